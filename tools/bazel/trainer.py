"""The trainer as a Bazel program.

Apart from `lingvo_gpipe/trainer.py`: Python puts the folder of the main file first on its path,
where a module of ours named like one of the standard library would hide that one.
"""

import os

from lingvo_gpipe import trainer

if __name__ == "__main__":
    # Where `bazel run` was typed, so that --logdir=runs/digits means what it says.
    os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    trainer.main()
