"""Short film reviews, good or bad: SST-2's files if `data.root` is their folder, otherwise synthetic ones.

A list of good and bad words does not suffice for the synthetic ones: "not dull" is good, and in a sentence with "but",
only the second half counts.
"""

from pathlib import Path

import numpy as np

from deeplightning.data.text import TextData, Texts

GOOD = ["charming", "tender", "funny", "gripping", "wise", "graceful", "moving", "brilliant", "fresh", "honest"]
BAD = ["dull", "clumsy", "bleak", "tedious", "shallow", "noisy", "stale", "lifeless", "silly", "bloated"]
SUBJECTS = ["film", "plot", "cast", "script", "ending", "music", "camera", "hero", "dialogue", "story"]
OPENINGS = ["the", "this", "its", "a film whose", "it 's true : the"]
SIZES = {"train": 12000, "val": 300, "test": 300}


class Reviews(TextData):
    """Reviews in two classes, negative and positive.

    Args:
        cfg: the whole config; without `data.root` the reviews are synthetic, and the same each time.
        train: name of the training file, in the format `sentence<TAB>label`.
        validation: name of the validation file.
        test: name of the test file.
        options: see `TextData`.
    """

    def __init__(self, cfg, train="train.tsv", validation="dev.tsv", test="test.tsv", **options):
        files = {"train": train, "validation": validation, "test": test} if cfg.data.root is not None else {}
        super().__init__(cfg, **files, class_names=["negative", "positive"], **options)

    def read(self):
        return super().read() if self.files else made_up()


def made_up(seed=0):
    """Return synthetic texts and labels for each set."""
    random = np.random.RandomState(seed)
    sets = {}
    for name, size in SIZES.items():
        labels = random.randint(2, size=size)
        texts = [review(label, random) for label in labels]
        sets[name] = Texts(texts, labels.astype(np.int64), np.arange(1, size + 1), Path("made-up reviews"))
    return sets


def review(label, random):
    """Return one sentence, good (1) or bad (0)."""
    opening, verdict = random.choice(OPENINGS), judgement(label, random)
    if random.rand() < 0.4:
        verdict = f"{judgement(1 - label, random)} , but the {random.choice(SUBJECTS)} is {verdict}"
    return f"{opening} {random.choice(SUBJECTS)} is {verdict} ."


def judgement(label, random):
    """Return a good (1) or a bad (0) word, or the negation of an opposite one."""
    return (
        f"not {random.choice(BAD if label else GOOD)}" if random.rand() < 0.3 else random.choice(GOOD if label else BAD)
    )
