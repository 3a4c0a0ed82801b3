"""Scores of translations that are there already: BLEU and chrF, as tables, files and plots."""
