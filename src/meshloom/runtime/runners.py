"""Who runs a queue's commands: a thread of its own, as they come or one at a time, or a seed that shuffles the queues.

A runner takes commands in order and says when a number is done. The shuffling one lets one thread run at a time: at
every chance it runs a random few of the commands whose turn it is, so that a program meets many orders of completion,
each of which can be had again from its seed.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Protocol

from meshloom.runtime.launches import Launches


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

    @property
    def waits(self) -> bool:
        """Whether whoever enqueues a command waits for it."""

    def submit(self, work: Work) -> None:
        """Take a command."""

    def wait(self, number: int, timeout: float | None) -> bool:
        """Wait until that command and all before it are done; False if they are not within the timeout."""

    def some(self) -> None:
        """A chance to go on, where there is no thread that does by itself."""

    def abandon(self, number: int) -> list[Work]:
        """Leave what is running to itself: all up to a number counts as done, and what was not run comes back."""

    def stop(self, timeout: float | None) -> bool:
        """Let go of the thread after what it was given; False if it does not end."""


class Threaded:
    """A thread per queue, started with its first command."""

    def __init__(self, name: str, launches: Launches, waits: bool = False) -> None:
        self._name, self._launches = name, launches
        self.waits = waits  # whether whoever enqueues a command waits for it
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
        return self._launches.wait(lambda left: self._progress.wait(number, left), timeout)

    def some(self) -> None:
        """The thread goes on by itself."""

    def abandon(self, number: int) -> list[Work]:
        left, inbox, progress = [], self._inbox, self._progress
        while not inbox.empty():
            work = inbox.get()
            if work is not None:
                left.append(work)
        inbox.put(None)  # should the thread ever come back
        self._inbox, self._progress, self._thread = SimpleQueue(), Progress(number), None
        progress.advance(number)
        return left

    def stop(self, timeout: float | None) -> bool:
        if self._launches.is_forked:  # there is no thread here
            return True
        self._inbox.put(None)
        return self._launches.wait(self._join, timeout)

    def _join(self, timeout: float | None) -> bool:
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()


class Progress:
    """The number of the last command that is done."""

    def __init__(self, done: int = 0) -> None:
        self._changed = threading.Condition()
        self._done = done

    def advance(self, number: int) -> None:
        """A command is done."""
        with self._changed:
            self._done = max(self._done, number)
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
        """Run a few commands whose turn it is; inside of one that is running there is no chance to."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            for _ in range(self._random.choice((0, 0, 1, 1, 2, 4))):
                if not self.step():
                    return
        finally:
            self.lock.release()

    def step(self) -> bool:
        """Run one command of a random queue; False if none can go on."""
        with self.lock:
            ready = [queue for queue in self.queues if queue.waiting and queue.waiting[0].is_ready()]
            if not ready:
                return False
            chosen = self._random.choice(ready)
            if self._longest:
                time.sleep(self._random.random() * self._longest)
            chosen.run_next()
            return True


class Shuffled:
    """One queue of a shuffle."""

    waits = False

    def __init__(self, shuffle: Shuffle, thread: Threaded) -> None:
        self._shuffle, self._thread = shuffle, thread
        self.waiting: deque[Work] = deque()
        shuffle.queues.append(self)

    def submit(self, work: Work) -> None:
        self.waiting.append(work)

    def run_next(self) -> None:
        """Run the next command."""
        work = self.waiting.popleft()
        self._thread.submit(work)
        self._thread.wait(work.number, None)

    def wait(self, number: int, timeout: float | None) -> bool:
        while not self._thread.wait(number, 0.0) and self._shuffle.step():
            pass
        return self._thread.wait(number, 0.0)

    def some(self) -> None:
        self._shuffle.some()

    def abandon(self, number: int) -> list[Work]:
        left = [*self._thread.abandon(number), *self.waiting]
        self.waiting.clear()
        return left

    def stop(self, timeout: float | None) -> bool:
        last = self.waiting[-1].number if self.waiting else 0
        ended = self.wait(last, timeout)
        with self._shuffle.lock:
            if self in self._shuffle.queues:
                self._shuffle.queues.remove(self)
        return self._thread.stop(timeout) and ended
