"""Model a disk after power loss: build the states that the journal of a run's calls allows.

The model follows POSIX: an fsync of a file makes its content durable, an fsync of a folder the names in it. Everything
else may be partly lost: a write is kept, torn at a sector, zeroed or dropped; a name is kept or not. In half of the
states names are kept in order, as the journals of ext4 and XFS do.
"""

import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from storm.shim import Call

SECTOR = 512


@dataclass
class Node:
    """A file or a folder.

    Attributes:
        writes: for a file, in order: offset and data; data None: it was truncated to that size.
        durable: how many writes an fsync has made durable.
        live: for a folder, the names that a process sees now.
    """

    is_folder: bool
    writes: list[tuple[int, bytes | None]] = field(default_factory=list)
    durable: int = 0
    live: dict[str, "Node"] = field(default_factory=dict)


@dataclass
class Change:
    """An atomic change of names: each is set to a node or removed. An fsync of `folder` makes it durable."""

    names: list[tuple[Node, str, Node | None]]
    folder: Node
    is_durable: bool = False


class Disk:
    """The changes that a run makes to its files, call by call.

    Args:
        root: the folder that the run writes to; it is empty and durable at first.
    """

    def __init__(self, root: Path):
        self.root, self.top = root, Node(True)
        self.changes: list[Change] = []
        self._nodes: dict[int, Node] = {}

    def apply(self, call: Call) -> None:
        """Apply the next call; a failed one changes nothing."""
        if call.error or not self._is_below(call.path):
            return
        if call.kind in ("create", "mkdir"):
            self._nodes[call.inode] = made = Node(call.kind == "mkdir")
            self._change((call.path, made))
        elif call.kind == "write":
            self._nodes[call.inode].writes.append((call.offset, call.data))
        elif call.kind == "truncate":
            self._nodes[call.inode].writes.append((call.offset, None))
        elif call.kind == "sync":
            self._sync(self.top if call.path == str(self.root) else self._nodes[call.inode])
        elif call.kind in ("unlink", "rmdir"):
            self._change((call.path, None))
        elif call.kind in ("rename", "link"):
            moved = self.find(call.path)
            assert moved is not None, call
            if call.kind == "link":
                self._change((call.other, moved))
            elif moved is not self.find(call.other):  # else both are names of the same file, and nothing changes
                self._change((call.other, moved), (call.path, None))

    def find(self, path: str) -> Node | None:
        """Return the file or folder that a process sees under a path."""
        node: Node | None = self.top
        for part in Path(path).relative_to(self.root).parts:
            node = node.live.get(part) if node is not None else None
        return node

    def pending(self) -> int:
        """Return how many writes and changes of names are not durable."""
        files = {id(node): node for node in self._nodes.values()}
        return sum(not change.is_durable for change in self.changes) + sum(
            len(node.writes) - node.durable for node in files.values()
        )

    def state(self, draw: random.Random, share: float, in_order: bool = False) -> dict[str, bytes | None]:
        """Draw a state of the disk: the content of each file by its path, None for folders.

        Args:
            draw: chooses which changes that are not durable are kept.
            share: fraction that is kept on average; 0: nothing.
            in_order: keep a prefix of the changes of names.
        """
        cut = draw.randint(0, sum(not change.is_durable for change in self.changes))
        names: dict[tuple[int, str], Node | None] = {}
        for change in self.changes:
            if not change.is_durable:
                cut -= 1
                if not (cut >= 0 if in_order else draw.random() < share):
                    continue
            for folder, name, node in change.names:
                names[id(folder), name] = node
        found: dict[str, bytes | None] = {}
        contents: dict[int, bytes] = {}

        def walk(folder: Node, path: str) -> None:
            for (owner, name), node in names.items():
                if owner != id(folder) or node is None:
                    continue
                own = f"{path}{name}"
                if node.is_folder:
                    found[own] = None
                    walk(node, f"{own}/")
                else:
                    if id(node) not in contents:
                        contents[id(node)] = content_of(node, draw, share)
                    found[own] = contents[id(node)]

        walk(self.top, "")
        return found

    def _is_below(self, path: str) -> bool:
        return path == str(self.root) or path.startswith(f"{self.root}{os.sep}")

    def _change(self, *names: tuple[str, Node | None]) -> None:
        if names[0][0] == str(self.root):  # it existed before
            return
        changed = []
        for path, node in names:
            folder = self.find(str(Path(path).parent))
            assert folder is not None, path
            changed.append((folder, Path(path).name, node))
            if node is None:
                folder.live.pop(Path(path).name, None)
            else:
                folder.live[Path(path).name] = node
        self.changes.append(Change(changed, changed[0][0]))

    def _sync(self, node: Node) -> None:
        node.durable = len(node.writes)
        for change in self.changes:
            change.is_durable |= change.folder is node


def content_of(node: Node, draw: random.Random | None = None, share: float = 1.0) -> bytes:
    """Return the content of a file; `draw` chooses the fate of writes that are not durable, None keeps all."""
    content = bytearray()
    for number, (offset, data) in enumerate(node.writes):
        how = "kept"
        if draw is not None and number >= node.durable and draw.random() >= share:
            how = draw.choice(["dropped", "torn", "zeros"]) if share else "dropped"
        if how == "dropped":
            continue
        if data is None:
            content[offset:] = bytes(max(0, offset - len(content)))
            continue
        if how == "torn" and draw is not None:
            data = data[: draw.randint(0, len(data) // SECTOR) * SECTOR]
        if how == "zeros":
            data = bytes(len(data))
        content[len(content) :] = bytes(max(0, offset - len(content)))
        content[offset : offset + len(data)] = data
    return bytes(content)


def replay(root: Path, calls: Sequence[Call]) -> Disk:
    """Return the disk after these calls."""
    disk = Disk(root)
    for call in calls:
        disk.apply(call)
    return disk


def restore(state: dict[str, bytes | None], root: Path) -> None:
    """Replace a folder by a state."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for path, content in sorted(state.items()):
        if content is None:
            (root / path).mkdir(exist_ok=True, parents=True)
        else:
            (root / path).parent.mkdir(exist_ok=True, parents=True)
            (root / path).write_bytes(content)
