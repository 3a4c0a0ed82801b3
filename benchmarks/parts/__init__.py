"""Parts of a step: backwards whole and cut, checks, updates of tables."""
