"""Short reviews of films, good or bad: SST-2's files where `data.root` names their folder, else some that are made up.

The made-up ones need more than a list of good and bad words: "not dull" is good, and only the first half of a sentence
with "but" in it deceives.
"""

from pathlib import Path

import numpy as np

from deeplightning.data.text import TextData, Texts

GOOD = ["charming", "tender", "funny", "gripping", "wise", "graceful", "moving", "brilliant", "fresh", "honest"]
BAD = ["dull", "clumsy", "bleak", "tedious", "shallow", "noisy", "stale", "lifeless", "silly", "bloated"]
THINGS = ["film", "plot", "cast", "script", "ending", "music", "camera", "hero", "dialogue", "story"]
OPENINGS = ["the", "this", "its", "a film whose", "it 's true : the"]
SIZES = {"train": 12000, "val": 300, "test": 300}


class Reviews(TextData):
    """Reviews in two classes, negative and positive.

    Args:
        cfg: the whole config; without `data.root` the reviews are made up, the same ones each time.
        train: name of the training file, in the format `sentence<TAB>label`.
        validation: likewise.
        test: likewise.
        options: see `TextData`.
    """

    def __init__(self, cfg, train="train.tsv", validation="dev.tsv", test="test.tsv", **options):
        files = {"train": train, "validation": validation, "test": test} if cfg.data.root is not None else {}
        super().__init__(cfg, **files, class_names=["negative", "positive"], **options)

    def read(self):
        return super().read() if self.files else made_up()


def made_up(seed=0):
    """Texts and labels for each set."""
    random = np.random.RandomState(seed)
    sets = {}
    for name, size in SIZES.items():
        labels = random.randint(2, size=size)
        texts = [review(label, random) for label in labels]
        sets[name] = Texts(texts, labels.astype(np.int64), np.arange(1, size + 1), Path("made-up reviews"))
    return sets


def review(label, random):
    """One sentence, good (1) or bad (0)."""
    opening, said = random.choice(OPENINGS), judgement(label, random)
    if random.rand() < 0.4:
        said = f"{judgement(1 - label, random)} , but the {random.choice(THINGS)} is {said}"
    return f"{opening} {random.choice(THINGS)} is {said} ."


def judgement(label, random):
    """A good or a bad word, or the opposite of one."""
    return (
        f"not {random.choice(BAD if label else GOOD)}" if random.rand() < 0.3 else random.choice(GOOD if label else BAD)
    )
