"""A recipe's data, opened: what trains, what is held out, and the ledger of all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from longstrand.config import DataSection, Source
from longstrand.data.documents import Documents, Stretches
from longstrand.data.ledger import Ledger, PartLedger, Served, SourceLedger, family_facts, letters_read_as_n
from longstrand.data.letters import LetterPolicy
from longstrand.data.loader import DocumentPacks, Loader, Shelf
from longstrand.data.reading import Reading
from longstrand.data.selection import Selection, select, tokenized
from longstrand.data.sequences import FamilyRules, Order, SequenceSet, family_set, window_set
from longstrand.data.splits import HELD_OUT, PART_NAMES, TRAIN, PartName, check_apart
from longstrand.data.tokens import TextTokenizer, letter_ids
from longstrand.errors import UserError


def open_data(
    section: DataSection, *, seed: int = 0, cache_dir: Path | None = None, model_folder: Path | None = None
) -> Data:
    """Reads, selects and splits what `[data]` names, and counts all of it.

    Args:
        seed: of the order of training (the split has its own).
        cache_dir: instead of `section.cache`.
        model_folder: the model's; with tokenizer "bases", a tokenizer.json in it gives each letter its token.

    Raises:
        UserError: whatever is wrong with a file, a region, the split or the tokenizer, in one line.
    """
    return _open(section, seed, cache_dir, model_folder, held_out=False)


def open_evaluation(
    sources: Sequence[Source],
    length: int,
    *,
    like: DataSection | None = None,
    cache_dir: Path | None = None,
    model_folder: Path | None = None,
    apart_from: Data | None = None,
    tokenizer: str | None = None,
) -> Data:
    """Files to evaluate on: everything in them is held out.

    Args:
        like: the section whose policies, tokenizer, families and cache apply (the defaults where None).
        apart_from: training data that must share no letter with these files.
        tokenizer: instead of that of `like`.

    Raises:
        UserError: as `open_data`; or the files overlap with what is trained on.
    """
    settings = (
        {} if like is None else like.model_dump(exclude={"sources", "length", "split", "reverse_complement"})
    )
    if tokenizer is not None:
        settings["tokenizer"] = tokenizer
    dumped = [source.model_dump() for source in sources]
    section = DataSection.model_validate({**settings, "sources": dumped, "length": length})
    data = _open(section, 0, cache_dir, model_folder, held_out=True)
    if apart_from is not None:
        apart_from.check_apart_from(data)
    return data


class Data:
    """What a recipe's `[data]` section stands for.

    Attributes:
        ledger: every letter and token and what became of it; `as_dict()` is data.json.
        max_token: the largest token id that can occur; the model's vocabulary must exceed it.
    """

    def __init__(
        self, section: DataSection, reading: Reading, letters: Selection, selection: Selection, seed: int
    ) -> None:
        self.section, self.seed = section, seed
        self._reading, self._letters, self._selection = reading, letters, selection
        self._known: dict[tuple[int, int, int, Order | None], SequenceSet] = {}
        self.ledger = Ledger([], section.model_dump(exclude={"sources", "cache"}, exclude_none=True))
        self._fill_ledger()

    @property
    def max_token(self) -> int:
        # A text tokenizer leaves the letters' stores behind, which no document reads.
        stores = [self._selection.stores[store] for store in np.unique(self._selection.stretches.store)]
        ids = self._reading.ids[self._reading.policy.normal()]
        return max(int(ids.max()) if s.holds_letters else s.facts["max_value"] for s in stores)

    def train_loader(self, sequences_per_step: int) -> Loader:
        """The order of training, from step 0.

        Raises:
            UserError: a source has nothing to train on (with what became of it).
        """
        shelves = []
        for index, line in enumerate(self.ledger.sources):
            sequences = self._sequences(index, TRAIN, self.section.length, None)
            if not len(sequences.in_epoch(0)):
                raise UserError(f"data: nothing to train on in {line.path}: {line.why_nothing('train')}")
            line.served = Served()
            shelves.append(Shelf(sequences, line.weight, line.served))
        return Loader(
            shelves,
            self._selection.stores,
            self._reading,
            length=self.section.length,
            sequences_per_step=sequences_per_step,
            seed=self.seed,
            reverse_complement=self.section.reverse_complement,
            fingerprint=self._fingerprint(sequences_per_step),
        )

    def documents(
        self,
        part: PartName = "held_out",
        *,
        length: int | None = None,
        sequences: int | None = None,
        order: Order | None = None,
    ) -> DocumentPacks:
        """The documents of one part of the split, each a pack of its own, in a fixed order.

        Of evaluation data, every part is all of it.

        They do not depend on the run's seed, so runs with several seeds are scored on the same documents. Letters
        are read on the strand they stand on.

        Args:
            length: tokens of a window or of a sequence of relatives (the recipe's where None).
            sequences: how many documents, evenly spread over all (all where None).
            order: "strangers" gives the control of the same sequences.

        Raises:
            UserError: the part is empty, or there are no families for a control.
        """
        which = HELD_OUT if self._all_held_out else PART_NAMES.index(part)
        if which != TRAIN and self.section.split is None and not self._all_held_out:
            raise UserError(f"data: no {part} part; add [data.split], or name evaluate.sources")
        if order is not None and self.section.families is None:
            raise UserError(f'data: order = "{order}" needs [data.families]')
        sets = [
            self._sequences(source, which, length or self.section.length, order)
            for source in range(len(self.section.sources))
        ]
        documents = Documents.joined([own.in_epoch(0) for own in sets])
        if not len(documents):
            reasons = [f"{line.path}: {line.why_nothing(part)}" for line in self.ledger.sources]
            raise UserError(f"data: the {part} part has no document ({'; '.join(reasons)})")
        chosen = np.arange(len(documents))
        if sequences is not None and sequences < len(documents):
            chosen = np.linspace(0, len(documents) - 1, sequences).round().astype(np.int64)
        return DocumentPacks(self._selection.stores, self._reading, documents, chosen)

    def check_apart_from(self, evaluation: Data) -> None:
        """Asserts that no letter of the training part stands in the evaluation data, on either strand.

        Raises:
            UserError: the first two stretches that overlap.
        """
        own, other = self._letters, evaluation._letters
        shift = len(own.stores)
        trained = own.stretches.take(np.flatnonzero(own.part_of == TRAIN))
        stretches = Stretches.joined([trained, replace(other.stretches, store=other.stretches.store + shift)])
        part_of = np.repeat([0, 1], [len(trained), len(other.stretches)])
        check_apart([*own.stores, *other.stores], stretches, part_of, names=("training", "evaluation"))

    @property
    def _all_held_out(self) -> bool:
        return bool((self._selection.part_of == HELD_OUT).all())

    def _sequences(self, source: int, part: int, length: int, order: Order | None) -> SequenceSet:
        """What one source shows of one part of the split."""
        key = (source, part, length, order)
        if key not in self._known:
            self._known[key] = self._new_sequences(*key)
        return self._known[key]

    def _new_sequences(self, source: int, part: int, length: int, order: Order | None) -> SequenceSet:
        own = self._selection.of(source, part)
        stores, stretches = self._selection.stores, self._selection.stretches.take(own)
        families = self.section.families
        if families is None:
            return window_set(stores, self._reading, stretches, length, self.section.n_max)
        fixed = self.section.split.seed if self.section.split is not None else 0
        rules = FamilyRules(
            least=families.members,
            seed=self.seed if part == TRAIN else fixed,
            order=order or families.order,
            n_max=self.section.n_max,
        )
        return family_set(stores, self._reading, stretches, self._selection.label[own], length, rules)

    def _fill_ledger(self) -> None:
        letters, selection = self._letters, self._selection
        for index, entry in enumerate(letters.inputs):
            stores = [letters.stores[store] for store in entry.stores]
            chosen = int(letters.stretches.lengths[letters.source_of == index].sum())
            read = np.unique(selection.stretches.store[selection.source_of == index])
            line = SourceLedger(
                path=entry.source.path,
                weight=entry.source.weight,
                kind=entry.kind,
                files=[{"path": str(store.source), **store.facts} for store in stores],
                values=entry.num_values,
                outside_regions=entry.num_values - chosen,
                named_twice=entry.named_twice,
                read_as_n=letters_read_as_n(stores, self._reading.policy),
                unknown_tokens=sum(selection.stores[s].facts.get("unknown_tokens", 0) for s in read),
            )
            for part, name in enumerate(PART_NAMES):
                own = letters.of(index, part)  # tokens of a stretch keep its place in the list
                if len(own):
                    line.parts[name] = PartLedger.of(
                        self._reading,
                        selection.stores,
                        self._sequences(index, part, self.section.length, None),
                        records=letters.num_records(own),
                        letters=int(letters.stretches.lengths[own].sum()),
                        values=int(selection.stretches.lengths[own].sum()),
                    )
            self.ledger.sources.append(line)
        if letters.families is not None:
            self.ledger.families = family_facts(letters.families)

    def _fingerprint(self, sequences_per_step: int) -> str:
        """Changes whenever the order or the content of training would."""
        selection, stretches = self._selection, self._selection.stretches
        digest = hashlib.sha256()
        for store in selection.stores:
            digest.update(store.digest.encode())
        arrays = (stretches.store, stretches.start, stretches.end, stretches.turned)
        for array in (*arrays, selection.source_of, selection.part_of, selection.label, self._reading.ids):
            digest.update(np.ascontiguousarray(array).tobytes())
        settings = self.section.model_dump(exclude={"sources", "cache", "tokenizer"})
        weights = [source.weight for source in self.section.sources]
        digest.update(json.dumps([settings, weights, self.seed, sequences_per_step], sort_keys=True).encode())
        return digest.hexdigest()


def _open(
    section: DataSection, seed: int, cache_dir: Path | None, model_folder: Path | None, held_out: bool
) -> Data:
    if section.reverse_complement and section.tokenizer != "bases":
        raise UserError(
            'data.reverse_complement = true: needs tokenizer = "bases", since the other strand of a token is no token; '
            "set it to false"
        )
    cache = cache_dir if cache_dir is not None else Path(section.cache)
    tokenizer = None if section.tokenizer == "bases" else TextTokenizer(section.tokenizer, section.cut)
    policy = LetterPolicy(section.case, section.n, section.iupac)
    reading = Reading(policy, letter_ids(model_folder if tokenizer is None else None))
    letters = select(section, cache, tokenizer)
    if held_out:
        letters = replace(letters, part_of=np.full(len(letters.stretches), HELD_OUT))
    elif not any(store.holds_letters for store in letters.stores):
        _refuse_policies(section)
    reading.check_letters(letters.stores, letters.stretches)
    check_apart(letters.stores, letters.stretches, letters.part_of)
    values = letters if tokenizer is None else tokenized(letters, tokenizer, policy, cache)
    return Data(section, reading, letters, values, seed)


def _refuse_policies(section: DataSection) -> None:
    """Refuses what would have no effect, since no source has letters."""
    for name in ("case", "n", "n_max", "iupac"):
        value = getattr(section, name)
        if value != DataSection.model_fields[name].default:
            raise UserError(
                f"data.{name} = {value}: is about nucleotide letters, and the sources hold none; remove it"
            )
