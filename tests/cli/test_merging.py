"""The lines of several ranks as one text: nothing lost, nothing twice, every rank's order kept, equal lines once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, strategies as st

from meshloom.cli import merging
from meshloom.cli.merging import Lines, Merger, Said, tag


def shown(merger: Merger, *said: tuple[int, str], now: float = 0.0) -> list[tuple[list[int], str]]:
    return [plain(each) for rank, line in said for each in merger.say(rank, line, now)]


def plain(said: Said) -> tuple[list[int], str]:
    return sorted(said.ranks), said.line


def test_a_line_that_all_say_is_shown_once_and_at_once():
    merger = Merger(range(3))
    assert shown(merger, (0, "a"), (2, "a")) == []
    assert shown(merger, (1, "a")) == [([0, 1, 2], "a")]


def test_a_line_of_one_rank_is_shown_when_the_others_move_on():
    merger = Merger(range(2))
    assert shown(merger, (0, "mine"), (0, "both")) == []
    assert shown(merger, (1, "both")) == [([0], "mine"), ([0, 1], "both")]


def test_a_rank_that_is_ahead_does_not_keep_others_from_saying_the_same():
    merger = Merger(range(2))
    assert shown(merger, (0, "I am 0"), (0, "both")) == []
    assert shown(merger, (1, "I am 1")) == [([0], "I am 0"), ([1], "I am 1")]
    assert shown(merger, (1, "both")) == [([0, 1], "both")]


def test_a_line_that_gets_a_place_in_front_of_others_does_not_make_them_wait_longer():
    merger = Merger(range(3), wait=0.5)
    assert shown(merger, (0, "a"), (0, "b"), (2, "a")) == []
    assert shown(merger, (1, "c"), now=0.4) == [([0, 2], "a")]
    assert [plain(each) for each in merger.tick(0.5)] == [([1], "c"), ([0], "b")]


def test_a_line_of_some_ranks_is_shown_after_the_wait_and_not_before():
    merger = Merger(range(3), wait=0.5)
    assert shown(merger, (0, "a"), (1, "a")) == []
    assert merger.due == 0.5
    assert merger.tick(0.49) == []
    assert [plain(each) for each in merger.tick(0.5)] == [([0, 1], "a")]
    assert shown(merger, (2, "a"), now=0.6) == [] and merger.due == 1.1  # too late: a line of its own
    assert [plain(each) for each in merger.leave(0, 0.7) + merger.leave(1, 0.7)] == [([2], "a")]


def test_a_rank_that_has_ended_is_not_waited_for():
    merger = Merger(range(3))
    assert shown(merger, (0, "a"), (1, "a")) == []
    assert [plain(each) for each in merger.leave(2, 0.0)] == [([0, 1], "a")]


def test_lines_in_another_order_keep_the_order_of_their_rank():
    merger = Merger(range(2))
    found = shown(merger, (0, "a"), (0, "b"), (1, "b"), (1, "a"))
    found += [plain(each) for rank in range(2) for each in merger.leave(rank, 0.0)]
    assert found == [([0], "a"), ([0, 1], "b"), ([1], "a")]


def test_repeated_lines_are_counted_and_not_folded():
    merger = Merger(range(2))
    assert shown(merger, (0, "x"), (0, "x"), (1, "x")) == [([0, 1], "x")]
    assert shown(merger, (1, "x")) == [([0, 1], "x")]


def test_a_rank_that_runs_ahead_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(merging, "LIMIT", 10)
    merger = Merger(range(2), wait=1e9)
    found = shown(merger, *((0, str(number)) for number in range(25)))
    assert found == [([0], str(number)) for number in range(15)]


SPEECH = st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.floats(0, 0.4)), max_size=40)


@given(SPEECH)
def test_nothing_is_lost_and_every_rank_keeps_its_order(speech):
    merger, now = Merger(range(4), wait=0.5), 0.0
    found: list[Said] = []
    for rank, line, pause in speech:
        now += pause
        found += merger.tick(now) + merger.say(rank, line, now)
    for rank in range(4):
        found += merger.leave(rank, now)
    for rank in range(4):
        assert [each.line for each in found if rank in each.ranks] == [line for who, line, _ in speech if who == rank]
    said = Counter(line for _, line, _ in speech)
    assert sum(len(each.ranks) for each in found) == sum(said.values()) and merger.due is None


@given(SPEECH)
def test_ranks_that_say_the_same_in_time_are_shown_as_all(speech):
    lines = [line for _, line, _ in speech]
    merger = Merger(range(3))
    found = [each for line in lines for rank in (2, 0, 1) for each in merger.say(rank, line, 0.0)]
    assert [plain(each) for each in found] == [([0, 1, 2], line) for line in lines]


def test_bytes_become_lines_wherever_they_are_cut():
    text = "één\nzwei\r\n\n三\nlast".encode()
    for cut in range(len(text) + 1):
        lines = Lines()
        found = lines.feed(text[:cut], 0.0) + lines.feed(text[cut:], 0.0) + lines.end()
        assert found == ["één", "zwei", "", "三", "last"], cut


def test_half_a_line_is_shown_after_the_wait():
    lines = Lines(wait=0.5)
    assert lines.feed(b"whole\nhalf", 1.0) == ["whole"]
    assert lines.due == 1.5 and lines.tick(1.4) == []
    assert lines.feed(b" more", 1.4) == [] and lines.tick(1.5) == ["half more"]
    assert lines.due is None and lines.end() == []


def test_a_progress_bar_shows_where_it_stands():
    lines = Lines(wait=0.5)
    assert lines.feed(b"\r10%", 0.0) + lines.feed(b"\r20%", 0.3) == []
    assert lines.tick(0.5) == ["20%"]
    assert lines.feed(b"\r30%\r100%\n", 0.6) == ["100%"]


def test_broken_bytes_are_shown_as_such():
    lines = Lines()
    assert lines.feed(b"a\xffb\n\xe2\x82", 0.0) == ["a\ufffdb"]
    assert lines.end() == ["\ufffd"]


def test_the_tag_names_the_ranks():
    assert tag([2], 4) == "[rank 2]"
    assert tag({0, 1, 2, 5, 7, 8}, 9) == "[ranks 0-2,5,7-8]"
    assert tag(range(8), 8) == "[all 8]"
    assert tag([0], 1) == "[rank 0]"
    assert tag(range(4, 8), 8) == "[ranks 4-7]"  # all of this host are not all
