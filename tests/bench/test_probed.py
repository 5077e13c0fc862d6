"""The figure of `probe` recounts what it shows, and falls short where a count is wrong or random tokens are missing."""

from collections import Counter

import pytest

from longstrand.bench import probed
from longstrand.bench._small_models import documents, model
from longstrand.checks.probed import Probe
from longstrand.data import Pack


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr(probed, "LENGTH", 40)
    packs = [Pack.from_documents(documents((40,), seed=at)) for at in range(2)]
    given, (real, random) = model("KDK"), (probed._small_probe(model("KDK"), packs) for _ in range(2))
    return Probe(probed._subject([40, 40]), given.architecture, real, random)


def test_without_human_x_the_counts_are_still_compared():
    records = probed.measure(None)
    assert records[0]["pass"] and records[0]["measured"].startswith("0 of ")
    assert [record["pass"] for record in records[1:]] == [False] * 3
    assert all("issue" in record["skipped"].lower() for record in records[1:])


def test_a_count_that_is_wrong_falls_short(monkeypatch):
    def wrong(*arguments):
        counted = recount(*arguments)
        counted["pools"] = {layer: backs - Counter([max(backs)]) for layer, backs in counted["pools"].items()}
        return counted

    recount = probed.recount
    monkeypatch.setattr(probed, "recount", wrong)
    monkeypatch.setattr(probed, "SMALL", (((33, 64),),))
    assert not probed._recounted()["pass"]


def test_a_record_needs_as_many_random_tokens_as_real_ones(found):
    assert probed._record("name", found, "at /home\nLoss: 1")["pass"]
    found.random.loads.layers[1].counts[0] -= 1
    assert not probed._record("name", found, "at /home\nLoss: 1")["pass"]
