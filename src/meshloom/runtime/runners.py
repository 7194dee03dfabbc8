"""Who runs a queue's commands: a thread of its own, the caller at once, or a seed that shuffles the queues.

A runner takes commands in order and says when a number is done. The shuffling one has no threads: at every chance it
runs a random few of the commands whose turn it is, so that a program meets many orders of completion, each of which can
be had again from its seed.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Protocol


class Work(Protocol):
    """What a runner runs."""

    @property
    def number(self) -> int:
        """Its place on its queue."""

    def perform(self) -> None:
        """Do it; never raises."""

    def is_ready(self) -> bool:
        """Whether it could go on without waiting for another queue."""


class Runner(Protocol):
    """Runs the commands of one queue in order."""

    def submit(self, work: Work) -> None:
        """Take a command."""

    def wait(self, number: int, timeout: float | None) -> bool:
        """Wait until that command and all before it are done; False if they are not within the timeout."""

    def some(self) -> None:
        """A chance to go on, where there is no thread that does by itself."""

    def stop(self, timeout: float | None) -> bool:
        """Let go of the thread after what it was given; False if it does not end."""


class Inline:
    """Runs every command where it is enqueued."""

    def submit(self, work: Work) -> None:
        work.perform()

    def wait(self, number: int, timeout: float | None) -> bool:
        return True

    def some(self) -> None:
        """Everything is done already."""

    def stop(self, timeout: float | None) -> bool:
        return True


class Threaded:
    """A thread per queue, started with its first command."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox: SimpleQueue[Work | None] = SimpleQueue()
        self._progress = Progress()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._inbox, self._progress), name=self._name, daemon=True
            )
            self._thread.start()
        self._inbox.put(work)

    def wait(self, number: int, timeout: float | None) -> bool:
        return self._progress.wait(number, timeout)

    def some(self) -> None:
        """The thread goes on by itself."""

    def stop(self, timeout: float | None) -> bool:
        self._inbox.put(None)
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()


class Progress:
    """The number of the last command that is done."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._done = 0

    def advance(self, number: int) -> None:
        """A command is done."""
        with self._changed:
            self._done = number
            self._changed.notify_all()

    def wait(self, number: int, timeout: float | None) -> bool:
        """Wait for a number."""
        if self._done >= number:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= number, timeout)


def _work(inbox: SimpleQueue[Work | None], progress: Progress) -> None:
    while True:
        work = inbox.get()
        if work is None:
            return
        work.perform()
        number = work.number
        del work  # what it holds may go before the next one comes
        progress.advance(number)


class Shuffle:
    """The seed that all queues of a mesh share, and their commands that are not done."""

    def __init__(self, seed: int, longest: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._longest = longest
        self.queues: list[Shuffled] = []
        self.lock = threading.RLock()

    def some(self) -> None:
        """Run a few commands whose turn it is."""
        with self.lock:
            for _ in range(self._random.choice((0, 0, 1, 1, 2, 4))):
                if not self.step():
                    return

    def step(self) -> bool:
        """Run one command of a random queue; False if none can go on."""
        with self.lock:
            ready = [queue for queue in self.queues if queue.waiting and queue.waiting[0].is_ready()]
            if not ready:
                return False
            chosen = self._random.choice(ready)
            if self._longest:
                time.sleep(self._random.random() * self._longest)
            work = chosen.waiting.popleft()
            work.perform()
            chosen.done = work.number
            return True


class Shuffled:
    """One queue of a shuffle."""

    def __init__(self, shuffle: Shuffle) -> None:
        self._shuffle = shuffle
        self.waiting: deque[Work] = deque()
        self.done = 0
        shuffle.queues.append(self)

    def submit(self, work: Work) -> None:
        self.waiting.append(work)
        self._shuffle.some()

    def wait(self, number: int, timeout: float | None) -> bool:
        while self.done < number and self._shuffle.step():
            pass
        return self.done >= number

    def some(self) -> None:
        self._shuffle.some()

    def stop(self, timeout: float | None) -> bool:
        last = self.waiting[-1].number if self.waiting else 0
        ended = self.wait(last, timeout)
        with self._shuffle.lock:
            if self in self._shuffle.queues:
                self._shuffle.queues.remove(self)
        return ended
