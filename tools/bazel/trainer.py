"""The trainer as a Bazel program.

Apart from `lingvo_gpipe/trainer.py`: Python puts the folder of the main file first on its path,
where a module of ours named like one of the standard library would hide that one.
"""

from lingvo_gpipe import trainer

if __name__ == "__main__":
    trainer.main()
