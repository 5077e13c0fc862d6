"""What layers choose is seen tile by tile, whichever walk a pass takes, and the pass stays as it is."""

import torch

from longstrand.bench._small_models import model, pack
from longstrand.memory import ChoiceWatch, Levers, SideLosses

LENGTHS = (1, 2, 3, 21, 33, 5)


class Keeps:
    def __init__(self):
        self.seen = []

    def chosen(self, layer, tile, choices):
        self.seen.append((layer, tile.at, {name: rows.clone() for name, rows in choices.items()}))

    def joined(self):
        """All tokens' choices by layer and kind, in the order of the pack."""
        parts = {}
        for layer, at, choices in sorted(self.seen, key=lambda each: each[:2]):
            for name, rows in choices.items():
                parts.setdefault((layer, name), []).append((at, rows))
        return {key: torch.cat([rows for _, rows in of]) for key, of in parts.items()}


def test_a_pass_without_a_graph_shows_the_choices_of_one_with_a_graph():
    trained, given, watches = model("KDDK"), pack(LENGTHS), (Keeps(), Keeps(), Keeps())
    assert isinstance(watches[0], ChoiceWatch)
    with torch.no_grad():
        without = trained.token_logprobs(given, Levers(tile=16), SideLosses(choice_watch=watches[0]))
        trained.token_logprobs(given, Levers(tile=7), SideLosses(choice_watch=watches[1]))
    logprobs = trained.token_logprobs(given, Levers(tile=16), SideLosses(choice_watch=watches[2]))
    logprobs.sum().backward()
    assert torch.equal(without, logprobs)
    found = [watch.joined() for watch in watches]
    assert found[0].keys() == found[1].keys() == found[2].keys()
    assert set(found[0]) == {(1, "experts"), (1, "pools"), (2, "experts"), (2, "pools"), (3, "experts")}
    for key, rows in found[0].items():
        assert len(rows) == len(given)
        assert torch.equal(rows, found[1][key]) and torch.equal(rows, found[2][key])
    assert len(watches[2].seen) == 4 * -(-len(given) // 16)  # not again in recompute
