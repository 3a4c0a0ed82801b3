"""`python -m lingvo_gpipe.repeat`."""

from lingvo_gpipe.repeat.program import main

if __name__ == "__main__":
    main()
