"""Are languages with little text translated better by one model of many languages?

`python -m benchmarks.evidence.many --text=FOLDER --folder=RUNS --minutes=N` goes on where it was
stopped, with

- a model for all 42 languages of the set;
- a model for each of twelve (two sizes, three rates of dropout, three seeds of the best);
- the first continued on each of the twelve at two learning rates, or left as it is;
- one for all that samples in proportion (T=1), and a deep one, for as many updates.

Each run keeps the weights of its best accuracy on `valid`. Those of its best loss translate worse:
a model of one language has chrF 28.7 after 320 updates, where its loss is least, and 31.8 after 800
(fur).

`--only=alone/ace,continued` goes on with these runs alone; two commands with other runs may run at
once, but `continued`, `proportional` and `deep` need the first one, `many`.

FOLDER is what `unpack.py many all FOLDER` writes. `benchmarks.evidence.many_report` makes the
tables and the picture.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.evidence import languages, runs
from benchmarks.evidence.runs import Result, Trainer
from lingvo_gpipe.params.mt import small
from lingvo_gpipe.tasks.mt.input import Translation
from lingvo_gpipe.tasks.mt.model.transformer import TranslationTransformer
from lingvo_gpipe.tasks.mt.task import TranslationTask
from lingvo_gpipe.tasks.mt.text.corpora.text_files import TranslateFolder
from lingvo_gpipe.tasks.mt.text.preparation import Preparation
from lingvo_gpipe.tasks.mt.text.vocabulary import VocabularyTraining


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """T(L, H, A) and its units."""

    layers: int
    hidden: int
    heads: int
    units: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How large the comparison is; the default is that of the evidence.

    Attributes:
        sizes: of the models of one language.
        dropouts: their rates.
        seeds: of the best of them.
        many: size of the model of all languages.
        many_dropout: of it, and of the deep one. With 0.1 its loss rose after 1,000 updates.
        deep: a model of as many parameters with twice the layers.
        steps: updates of a model at most, of one language and of all. After 3,200 updates the
            accuracy of the model of all languages still rose.
        intervals: updates between two evaluations, of a model of one language and of all. A
            training ends when the accuracy has not risen in three of them.
        tuning_rates: learning rates of a continued model; the best counts. With 0 it stays as it
            is, and is evaluated once.
        tuning_steps: updates of a continued model at most, with twenty evaluations.
        tuning_patience: evaluations after which it ends if the accuracy has not risen; in all as
            many updates as three intervals of a model of one language.
        vocabulary: pieces of one language, and of all.
        tokens: of a mini-batch of one language, and of all. With 512 of one language, chrF of the
            best kind was 34.7 and 31.8 (fur, two seeds); with 1,024 it was 38.3, 37.4 and 36.3.
        dtype: of products; `mixed_bfloat16` is faster on a CPU with instructions for it.
    """

    sizes: Mapping[str, Size] = dataclasses.field(
        default_factory=lambda: {"small": Size(2, 256, 2, 128), "wide": Size(3, 768, 4, 192)}
    )
    dropouts: tuple[float, ...] = (0.1, 0.3, 0.5)
    seeds: tuple[int, ...] = (0, 1, 2)
    many: Size = Size(3, 768, 4, 192)
    many_dropout: float = 0.3
    deep: Size = Size(6, 384, 2, 192)
    steps: tuple[int, int] = (3_200, 10_000)
    intervals: tuple[int, int] = (160, 400)
    tuning_rates: tuple[float, ...] = (0.0, 2e-4, 1e-3)
    tuning_steps: int = 1_200
    tuning_patience: int = 8
    vocabulary: tuple[int, int] = (2_000, 8_000)
    tokens: tuple[int, int] = (1_024, 4_096)
    dtype: str = "float32"


class Comparison:
    """The runs of the comparison, each made when it is first asked for."""

    def __init__(
        self, plan: Plan, chosen: Sequence[languages.Scarce], text: Path, trainer: Trainer
    ) -> None:
        """Train nothing yet.

        Args:
            plan: how large it is.
            chosen: the languages with little text.
            text: folder with a folder of text for each language.
            trainer: runs the trainer.
        """
        self.plan = plan
        self.chosen = chosen
        self._text = text
        self._trainer = trainer

    def kinds(self) -> Iterator[tuple[str, Callable[[], Iterable[Result]]]]:
        """Yield the name of each kind of run, and what returns their results.

        The model of all languages comes first, so that the first language can be compared.
        """
        yield "many", lambda: [self._of_all("many")]
        for code in (each.code for each in self.chosen):
            yield f"alone/{code}", functools.partial(self._alone, code)
            yield f"continued/{code}", functools.partial(self._continued, code)
        yield "proportional", lambda: [self._of_all("proportional")]
        yield "deep", lambda: [self._of_all("deep")]

    def _alone(self, code: str) -> Iterator[Result]:
        """Yield the results of the models of one language, of the best kind for each seed."""
        plan = self.plan
        first, *_ = plan.seeds
        tasks = {
            f"alone/{code}/{name}_{dropout}_seed_{first}": self._task(
                size, dropout, plan.steps[0], f"{code}:en"
            )
            for (name, size), dropout in itertools.product(plan.sizes.items(), plan.dropouts)
        }
        best = yield from self._tried(tasks, first)
        for seed in plan.seeds:
            name = f"{best.removesuffix(str(first))}{seed}"
            yield self._trainer.result(name, tasks[best], seed, translates=True)

    def _tried(
        self,
        tasks: Mapping[str, TranslationTask.Params],
        seed: int,
        start: Callable[[], Path] | None = None,
    ) -> Generator[Result, None, str]:
        """Yield the result of each task; return the name of the best."""
        results = {}
        for name, task in tasks.items():
            results[name] = self._trainer.result(name, task, seed, start)
            yield results[name]
        return max(results, key=lambda name: results[name].best)

    def _of_all(self, kind: str) -> Result:
        """Return the result of a model of all languages: many, proportional or deep.

        The last two are trained for as many updates as the first.
        """
        task = self._task_of_all(kind)
        if kind != "many":
            task.train.max_steps = self._of_all("many").updates
            task.eval.patience = None
        return self._trainer.result(kind, task, 0, translates=True)

    def _task_of_all(self, kind: str = "many") -> TranslationTask.Params:
        plan = self.plan
        size = plan.deep if kind == "deep" else plan.many
        temperature = 1.0 if kind == "proportional" else 5.0
        return self._task(size, plan.many_dropout, plan.steps[1], temperature=temperature)

    def _continued(self, code: str) -> Iterator[Result]:
        """Yield the results of the model of all languages, continued on one of them."""
        plan = self.plan
        task = self._task(plan.many, plan.many_dropout, plan.tuning_steps, temperature=5.0)
        task.model.set(num_partitions=1, num_micro_batches=1, recompute="never")
        task.input.set(pairs=(f"{code}:en",), batch_size=plan.tokens[0])
        interval = task.train.save_interval_steps = -(-plan.tuning_steps // 20)
        task.eval.patience = plan.tuning_patience

        def start() -> Path:
            return self._trainer.train("many", self._task_of_all(), 0) / "best"

        tasks = {}
        for rate in plan.tuning_rates:
            tuned = tasks[f"continued/{code}/{rate}"] = task.copy()
            tuned.train.optimizer.learning_rate = rate
            if not rate:
                tuned.train.max_steps = interval
        best = yield from self._tried(tasks, 0, start)
        yield self._trainer.result(best, tasks[best], 0, start, translates=True)

    def _task(
        self, size: Size, dropout: float, steps: int, pair: str = "", temperature: float = 1.0
    ) -> TranslationTask.Params:
        """Return the task of a model; of all languages if there is no pair."""
        plan, is_one = self.plan, bool(pair)
        folder = self._text / pair.partition(":")[0] if is_one else self._text
        vocabulary = plan.vocabulary[not is_one]
        codes = languages.all_of(self.chosen)
        pairs = (pair,) if is_one else tuple(f"{code}:en" for code in codes)
        records = self._trainer.folder / "records" / (pair.partition(":")[0] or "all")
        task = small.translation(
            TranslationTransformer(
                num_layers=size.layers,
                hidden=size.hidden,
                heads=size.heads,
                units=size.units,
                vocabulary=vocabulary,
                tie="softmax",
                packed=True,
                dropout=dropout,
            ),
            Translation.Params(
                data_dir=str(records),
                preparation=Preparation.Params(
                    corpora=[TranslateFolder.Params(folder=str(folder))],
                    pairs=pairs,
                    vocabulary=VocabularyTraining(size=vocabulary),
                ),
                batch_size=plan.tokens[not is_one],
                temperature=temperature,
                max_length=128,
                packing=True,
            ),
            small.TrainingPlan(
                max_steps=steps,
                peak_learning_rate=2.5e-3,
                warmup_steps=max(1, min(steps // 5, 400)),
                average_decay=0.99 if is_one else 0.995,
                evaluations=1,
            ),
        )
        if is_one:  # small enough for one core
            task.model.set(num_partitions=1, num_micro_batches=1, recompute="never")
        task.score.max_sentences = languages.SENTENCES
        task.model.dtype = plan.dtype
        task.train.save_interval_steps = plan.intervals[not is_one]
        task.eval.set(best="accuracy", best_is="highest", patience=3)
        return task


def main() -> None:
    """Go on with the runs until the sitting is over or all are done."""
    parser = runs.parser(__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="folder of each language's text")
    parser.add_argument("--dtype", default=Plan().dtype, help="of products")
    options = parser.parse_args()
    chosen = languages.choose(languages.count(options.text))
    trainer = Trainer(options.folder, options.minutes, results=options.results)
    comparison = Comparison(Plan(dtype=options.dtype), chosen, options.text, trainer)
    runs.sit(runs.picked(comparison.kinds(), options.only))


if __name__ == "__main__":
    main()
