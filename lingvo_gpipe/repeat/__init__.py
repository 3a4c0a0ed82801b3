"""One model trained several times: from several seeds, and with every setting of a grid.

    python -m lingvo_gpipe.repeat --seeds=1,2,3,4,5 -- --model=image.digits.MLP --logdir=runs/five
    python -m lingvo_gpipe.repeat --sweep=train.accumulate=1,2 -- --model=NAME --logdir=runs/grid

All flags after `--` are the trainer's. It runs once for each setting and seed, in a process of its
own and in a folder below LOGDIR, with --mode=train_eval. A run that was cut off continues when the
same command is given again, and one that is done is not run again. TensorBoard's HParams page shows
all of them: --logdir=LOGDIR.

What one run does belongs to `lingvo_gpipe.trainer`.
"""

from lingvo_gpipe.repeat.program import main, run
from lingvo_gpipe.repeat.summary import Summary

__all__ = ["Summary", "main", "run"]
