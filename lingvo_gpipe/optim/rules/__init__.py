"""Update rules: what one is, and those that there are. Learning rates are not part of a rule."""
