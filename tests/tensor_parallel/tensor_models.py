"""Models whose matrices are divided, and the plans for it."""

import warnings

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional

from samestep.recipes.gpt import Gpt

VOCABULARY, LENGTH, NUM_CLASSES = 24, 8, 8
PADDING = 0


class Encoder(nn.Module):
    """Texts to classes by `nn.TransformerEncoder`, with padding and with positions that see no later ones."""

    def __init__(self, batch_first=True, norm_first=False, p=0.2):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, p, batch_first=batch_first, norm_first=norm_first)
        self.batch_first = batch_first
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first and batch_first)
        self.last = nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        hidden = self.tokens(x)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        with warnings.catch_warnings():  # that nested tensors are a prototype
            warnings.simplefilter("ignore")
            hidden = self.encoder(hidden if self.batch_first else hidden.transpose(0, 1), later, x == PADDING)
        return self.last(hidden.mean(int(self.batch_first)))


class Embedded(nn.Module):
    """Tables and an output that are divided by their entries or features, and what is added to in place."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(LENGTH, 16)
        self.norm = nn.LayerNorm(16)
        self.feed_in, self.feed_out = nn.Linear(16, 24), nn.Linear(24, 16)
        self.gate = nn.Linear(16, 16)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        hidden = self.tokens(x) + self.places(torch.arange(LENGTH))
        fed = self.feed_out(functional.gelu(self.feed_in(self.norm(hidden))))
        fed += hidden
        hidden = fed
        return self.head((hidden * self.gate(hidden).sigmoid()).mean(1))


class Fickle(nn.Module):
    """Whether a divided layer takes part depends on the microbatch; one layer is frozen, and one never called."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16).requires_grad_(False)
        self.chain = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 16))
        self.extra = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 16))
        self.unused = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 16))
        self.chain[0].weight.requires_grad_(False)
        self.last = nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        hidden = self.chain(self.tokens(x).mean(1))
        if int(x.sum()) % 2:
            hidden = hidden + self.extra(hidden)
        return self.last(hidden)

    def tensor_plan(self):
        return {f"{name}.{place}": style for name in ("chain", "extra", "unused") for place, style in CHAINED.items()}


CHAINED = {"0": "colwise", "2": "rowwise"}


class Pieced(nn.Module):
    """A scale of its own on features of which each rank has some, which no plan names."""

    def __init__(self):
        super().__init__()
        self.tokens, self.scale = nn.Embedding(VOCABULARY, 16), Scale()
        self.feed_in, self.feed_out = nn.Linear(16, 12), nn.Linear(12, 16)
        self.last = nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        return self.last(self.feed_out(self.scale(self.feed_in(self.tokens(x).mean(1)))))


class Scale(nn.Module):
    """Multiplies all features by one number, which each rank learns from those that it has."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x):
        return x * self.factor


class Positioned(nn.Module):
    """A region by positions, with a layer in it that every rank has."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.region = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.last = nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        return self.last(self.region(self.tokens(x)).mean(1))


class Mixed(nn.Module):
    """A region by positions one of whose norms is in half precision, and a layer outside of it, too."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        norms = Cast(torch.bfloat16), nn.LayerNorm(16).bfloat16(), Cast(torch.float32), nn.LayerNorm(16)
        self.region = nn.Sequential(*norms, nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.last = nn.Linear(16, NUM_CLASSES).bfloat16()

    def forward(self, x):
        return self.last(self.region(self.tokens(x)).mean(1).bfloat16()).float()


class Cast(nn.Module):
    """Goes on in another dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


class Observed(Pieced):
    """Remembers the highest of all features that a rank has."""

    def __init__(self):
        super().__init__()
        self.scale = Observer()


class Observer(nn.Module):
    """A buffer that holds the highest feature of the last microbatch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("highest", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.highest.copy_(x.detach().abs().max())
        return x / (1 + self.highest)


class Named(Pieced):
    """Calls a layer by the name of its argument."""

    def forward(self, x):
        return self.last(self.feed_out(input=self.feed_in(input=self.tokens(x).mean(1))))


class OneByOne(nn.Module):
    """Calls the layers of a chain itself, and mixes features between them."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.chain = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, NUM_CLASSES))

    def forward(self, x):
        hidden = self.chain[1](self.chain[0](self.tokens(x).mean(1)))
        return self.chain[2](functional.normalize(hidden, dim=-1))


class Hooked(OneByOne):
    """A hook on a parameter."""

    def __init__(self):
        super().__init__()
        self.chain[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class Crossed(nn.Module):
    """A decoder layer that looks at something else."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.region = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True)
        self.last = nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        hidden = self.tokens(x)
        return self.last(self.region(hidden, hidden.roll(1, 1)).mean(1))


class SharedLinear(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.first, self.again = nn.Linear(16, 16), nn.Linear(16, 16)
        self.again.weight = self.first.weight
        self.last = nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        return self.last(self.again(self.first(self.tokens(x).mean(1))))


class Looking(nn.Module):
    """Wants to know what each position looks at."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.last = nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        hidden = self.tokens(x)
        mixed, weights = self.attention(hidden, hidden, hidden)
        return self.last(mixed.mean(1)) + weights.mean()


class Masked(nn.Module):
    """Attention each of whose heads sees other positions more."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.last = nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        hidden, masks = self.tokens(x), len(x) * 4 * LENGTH * LENGTH
        mask = torch.linspace(-4, 4, masks).sin().view(-1, LENGTH, LENGTH)
        mixed, _ = self.attention(hidden, hidden, hidden, attn_mask=mask, need_weights=False)
        mixed += hidden
        return self.last(mixed.mean(1))


class Turned(nn.Module):
    """A weight that lies in memory the other way round."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.chain = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, NUM_CLASSES))
        self.chain[0].weight = nn.Parameter(torch.randn(16, 12).t())

    def forward(self, x):
        return self.chain(self.tokens(x).mean(1))


class Shortened(nn.Module):
    """A model of all positions but the last."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return functional.pad(self.model(x[:, :-1]), (0, 0, 0, 1))

    def tensor_plan(self):
        return {f"model.{name}": style for name, style in self.model.tensor_plan().items()}


def chain():
    """Three layers that are divided, two of them a pair, dropout between them, and one that is left over."""
    return nn.Sequential(
        *(nn.Embedding(VOCABULARY, 16), nn.Flatten()),
        *(nn.Linear(128, 48), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(48, 24), nn.Tanh(), nn.Dropout(0.1)),
        nn.Linear(24, NUM_CLASSES),
    )


def with_a_frozen_norm():
    """A region by positions, whose norm is not trained."""
    model = Positioned()
    model.region[0].requires_grad_(False)
    return model


def gpt(p=0.2, tied=True):
    """Two blocks whose weights are larger than usual, so that rounding is not all that there is."""
    model = Gpt(layers=2, width=16, heads=4, context=LENGTH, dropout=p, tied=tied)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


MODELS = {
    "gpt": gpt,
    "gpt without dropout": lambda: gpt(0.0),
    "gpt with a head": lambda: gpt(tied=False),
    "encoder": Encoder,
    "encoder, norm first": lambda: Encoder(norm_first=True),
    "encoder, positions first": lambda: Encoder(batch_first=False),
    "encoder, positions and norm first": lambda: Encoder(batch_first=False, norm_first=True),
    "embedded": Embedded,
    "chain": chain,
    "fickle": Fickle,
    "pieced": Pieced,
    "positioned": Positioned,
    "frozen norm": with_a_frozen_norm,
    "mixed": Mixed,
    "shared": SharedLinear,
    "looking": Looking,
    "masked": Masked,
    "turned": Turned,
    "hooked": Hooked,
    "chain one by one": OneByOne,
    "observed": Observed,
    "named input": Named,
    "crossed": Crossed,
    "gpt without the last": lambda: Shortened(gpt()),
}
FED = {"feed_in": "colwise", "feed_out": "rowwise"}
OUTPUT = {"head": "colwise_gathered"}
GPT_PLAN = {
    "blocks": "sequence_region",
    "blocks.*.queries_keys_values": "packed_colwise:3",
    "blocks.*.attention_dropout": "dropout:1",
    "blocks.*.attention_out": "rowwise",
    "blocks.*.feed_in": "colwise",
    "blocks.*.feed_out": "rowwise",
    "blocks.*.dropout": "sequence",
}
POSITIONED = {"region": "sequence_region", "region.1": "colwise", "region.3": "rowwise"}
PLANS = {
    "by entries": {"tokens": "rowwise", **FED, **OUTPUT},
    "by features": {"tokens": "colwise_gathered", "places": "colwise_gathered", **FED, **OUTPUT},
    "fed": FED,
    "torch's own": {"feed_in": ColwiseParallel(), "feed_out": RowwiseParallel()},
    "queries mixed up": {**GPT_PLAN, "blocks.*.queries_keys_values": "colwise"},
    "norms left out": GPT_PLAN,
    "norm left out": POSITIONED,
    "first": {"first": "colwise"},
    "heads": {"attention": "heads"},
    "half a head": {"head": "colwise"},
    "crossed": {
        "region": "sequence_region",
        "region.self_attn": "heads",
        "region.multihead_attn": "heads",
        "region.norm*": "sequence",
        "region.dropout[123]": "sequence",
    },
    "places": {"position_embedding": "colwise"},
    "gathered": {
        "region": "sequence_region",
        "region.0": "sequence",
        "region.1": "colwise_gathered",
        "region.3": "colwise_gathered",
    },
    "norm": {**POSITIONED, "region.0": "sequence"},
    "mixed": {
        "region": "sequence_region",
        "region.1": "sequence",
        "region.3": "sequence",
        "region.4": "colwise",
        "region.6": "rowwise",
    },
    "all of the gpt": {
        **GPT_PLAN,
        "blocks.*.attention_norm": "sequence",
        "blocks.*.feed_norm": "sequence",
    },
}
