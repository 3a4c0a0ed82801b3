"""Recipes of translation to English."""
