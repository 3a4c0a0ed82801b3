"""What only an accelerator answers: a file for each question, asked by `__main__`."""
