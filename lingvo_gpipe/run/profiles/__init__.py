"""Measured timelines of some steps of a run (`--profile_steps`), and what they are written as."""
