"""A model of 30 thousand parameters, packs for it, and an optimizer that shows its gradients."""

import dataclasses
import json
from importlib import resources

import torch
from torch.distributed.tensor import DTensor

from longstrand.architecture import Architecture
from longstrand.config import TrainSection
from longstrand.data import Pack
from longstrand.model import load_model
from longstrand.model.parallelize import parallelize
from longstrand.parallel import as_stored, local_part, one_process
from longstrand.train.optimizer import Optimizer, freeze_all_but, trained_names

TOY = json.loads((resources.files("longstrand") / "configs/toy.json").read_text())
WIDTH = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "vocab_size": 32}
HEADS = {
    "num_attention_heads": 2,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
}
KDA = {"linear_num_heads": 2, "linear_head_dim": 8}
INDEXER = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 8, "index_kpool": 4}
TINY = dataclasses.replace(Architecture.from_hf(TOY), **WIDTH, **HEADS, **KDA, **INDEXER)


def settings(**values):
    return TrainSection(**{"steps": 10, "lr": 1e-2, "schedule": "constant", "clip": None, **values})


def tiny_model(dtype=torch.float64, seed=1):
    return load_model(TINY, dtype=dtype, seed=seed)


def documents(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(TINY.vocab_size, (length,), generator=generator) for length in lengths]


def packs(*lengths, seed=0):
    """One pack per length, so that the same documents can also stand in one."""
    return [Pack.from_documents([document]) for document in documents(*lengths, seed=seed)]


class RecordingOptimizer(Optimizer):
    """Keeps the gradients of each step, after clipping."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen = []

    def step(self, learning_rate):
        self.seen.append(
            {
                name: whole(as_stored(gradient.clone(), self.parameters[name], self.mesh))
                for name, gradient in self.gradients().items()
            }
        )
        super().step(learning_rate)


def optimizer_of(model, train, mesh=None):
    """Of the model's part for one rank of a mesh, where one is given."""
    names = trained_names(model.groups(), train)
    freeze_all_but(model, names)
    parallelize(model, mesh or one_process())
    return RecordingOptimizer(model, names, train, mesh=model.mesh)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(model):
    """Whole on every rank."""
    return {
        name: whole(as_stored(local_part(tensor), tensor, model.mesh)).clone()
        for name, tensor in model.state_dict().items()
    }
