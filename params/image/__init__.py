"""Recipes of image classification, a module for each dataset."""
