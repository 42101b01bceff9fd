"""Sequences, padded to the longest of the batch; more devices accumulate fewer batches, each a mean over its tokens."""

import tiny
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

ACCUMULATE = 4 // tiny.world_size()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, tokens):
        return self.head(self.embedding(tokens)).flatten(0, 1)


def collate(sequences):
    return pad_sequence(sequences, batch_first=True)  # 0 is padding


tiny.start()
data = [torch.randint(1, 9, (3 + 7 * index % 11,)) for index in range(48)]
batches = tiny.loader(data, tiny.BATCH // 4, collate_fn=collate)
model = tiny.parallel(Tagger())
optimizer = tiny.sgd(model)
for number, tokens in enumerate(batches, 1):
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten(), ignore_index=0)
    (loss / ACCUMULATE).backward()
    if number % ACCUMULATE == 0:
        optimizer.step()
        optimizer.zero_grad()
