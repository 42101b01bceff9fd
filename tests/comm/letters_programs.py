"""Programs about letters that tests run on every rank of a world."""

import torch

from samestep.comm.letters import letter_sizes, pack_letter, read_letters
from samestep.core.microbatches import microbatch_ranges
from samestep.core.tree import TreeSum, rank_blocks


def correspond(communicator, rounds, shares=None, too_long_on=None):
    """Sums one leaf a microbatch and exchanges letters, several times by one box; sums, numbers and words of each time.

    `rounds` holds the leaves of each; on the rank `too_long_on` a letter is longer than the others expect.
    """
    num_microbatches = len(rounds[0])
    ranges = microbatch_ranges(num_microbatches, communicator.world_size, shares)
    blocks = rank_blocks(ranges, num_microbatches)
    counts = [len(microbatches) for microbatches in ranges]
    num_words = 3 + int(communicator.rank == too_long_on) * 64
    box = communicator.letter_box(blocks, rounds[0][0], letter_sizes(num_words, counts))
    heard = []
    for number, leaves in enumerate(rounds):
        counter = TreeSum(torch.add)
        for microbatch in ranges[communicator.rank]:
            counter.push(blocks[communicator.rank][0].__class__(microbatch, 1), leaves[microbatch])
        numbers = [microbatch / 3 + number for microbatch in ranges[communicator.rank]]
        box.send(counter.sums, pack_letter([communicator.rank, number, -(2**63)] + [0] * (num_words - 3), numbers))
        box.fold()
        box.fold()
        told, words = read_letters(box.letters, num_words, counts)
        heard.append((box.finish().clone(), told, words))
    return heard
