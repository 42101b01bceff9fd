"""A trained state, and every kind of change to it that the digest and the checksum of a state must see."""

import torch
from torch import nn


def trained(steps=1, optimizer=torch.optim.Adam):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 300), nn.BatchNorm1d(300), nn.Linear(300, 30))
    made = optimizer(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.arange(120.0).view(4, 30)).sum().backward()
        made.step()
    return model, made


def change_a_bit(model, optimizer):
    model[0].weight.data.view(torch.int32)[0, 0] ^= 1


def change_the_last_bit(model, optimizer):
    model[2].weight.data.view(torch.int32)[-1, -1] ^= 1


def change_a_sign(model, optimizer):
    model[0].weight.data[7, 7] *= -1


def change_a_buffer(model, optimizer):
    model[1].running_mean[0] += 1


def change_a_count(model, optimizer):
    model[1].num_batches_tracked += 1


def change_the_optimizers_state(model, optimizer):
    optimizer.state[model[0].weight]["exp_avg"].view(torch.int32)[0, 0] ^= 1


def change_the_optimizers_step(model, optimizer):
    optimizer.state[model[0].bias]["step"] += 1


def change_the_steps_kind(model, optimizer):
    optimizer.state[model[0].bias]["step"] = float(optimizer.state[model[0].bias]["step"])


def add_a_number_to_the_optimizers_state(model, optimizer):
    optimizer.state[model[0].bias]["extra"] = 1


def add_a_truth_to_the_optimizers_state(model, optimizer):
    optimizer.state[model[0].bias]["extra"] = True


def nest_the_optimizers_state(model, optimizer):
    state = optimizer.state[model[0].weight]
    state["nested"] = [{"moments": (state["exp_avg"],)}]


def forget_the_optimizers_state(model, optimizer):
    del optimizer.state[model[2].bias]


def change_a_dtype(model, optimizer):
    model[1].num_batches_tracked = model[1].num_batches_tracked.int()


def change_a_dtype_of_equal_bytes(model, optimizer):
    model[1].running_mean = model[1].running_mean.view(torch.int32)


def change_a_shape(model, optimizer):
    model[0].weight.data = model[0].weight.data.view(30, 300)


def change_a_name(model, optimizer):
    model.register_buffer("later", model[1]._buffers.pop("running_var"))


def swap_the_signs_of_zeros(model, optimizer):
    model[1].running_mean.zero_().neg_()


def swap_two_numbers(model, optimizer):
    row = model[0].weight.data[3]
    row[[4, 9]] = row[[9, 4]]


def swap_two_parameters_of_one_shape(model, optimizer):
    a, b = model[0].bias.data.clone(), model[1].weight.data.clone()
    model[0].bias.data, model[1].weight.data = b, a


def swap_a_moment_and_its_parameter(model, optimizer):
    moment = optimizer.state[model[0].weight]["exp_avg"]
    value = moment.clone()
    moment.copy_(model[0].weight.data)
    model[0].weight.data.copy_(value)


def swap_the_two_moments(model, optimizer):
    state = optimizer.state[model[2].weight]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


CHANGES = [
    value
    for name, value in sorted(globals().items())
    if name.split("_")[0] in ("change", "add", "nest", "forget", "swap") and callable(value)
]
