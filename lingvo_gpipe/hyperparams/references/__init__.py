"""Classes, functions and dtypes in texts: by which name a text refers to them, today and before."""
