"""`samestep devices`: what hardware is there."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from samestep.devices.device import gib
from samestep.devices.inventory import Inventory, discover
from samestep.devices.selection import select
from samestep.errors import DeviceError
from samestep.text import counted, json_text, make_console, make_table

if TYPE_CHECKING:
    from rich.table import Table

    from samestep.devices.device import Device


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    free: Annotated[
        int | None,
        typer.Option(metavar="N", help="Print the line, such as CUDA_VISIBLE_DEVICES=…, that shows N idle devices."),
    ] = None,
) -> None:
    """Shows the devices: name, memory and processes.

    `env $(samestep devices --free 2) python train.py` runs a script on two idle devices.
    """
    inventory = discover()
    if free is not None:
        _print_free(free, inventory, as_json)
    elif as_json:
        print(json_text(_as_dict(inventory)))
    else:
        _print_table(inventory)


def _print_free(count: int, inventory: Inventory, as_json: bool) -> None:
    selection = select(f"free:{count}", inventory)
    if as_json:
        print(json_text({"indices": selection.indices, "environment": selection.environment}))
        return
    if not selection.environment:
        raise DeviceError(f"no variable limits what a process sees of {selection.describe()}; leave out --free")
    for name, entries in selection.environment.items():
        print(f"{name}={entries}")


def _as_dict(inventory: Inventory) -> dict[str, object]:
    return {
        "devices": [asdict(device) for device in inventory.devices],
        "cpu": {**asdict(inventory.cpu), "cores": inventory.cores},
        "torch": {**asdict(inventory.torch), "kind": inventory.torch.kind},
        "unusable": [asdict(device) for device in inventory.unusable],
        "variable": inventory.variable,
        "notes": list(inventory.notes),
    }


def _print_table(inventory: Inventory) -> None:
    console = make_console()
    if inventory.devices:
        console.print(_table(inventory.devices, "device"))
    if inventory.unusable:
        console.print(_table(inventory.unusable, "GPU (not usable)"))
    cpu = inventory.cpu
    memory = f"{gib(cpu.memory_used)} of {gib(cpu.memory_total)} in use"
    console.print(f"cpu: {cpu.name}, {counted(inventory.cores, 'core')}, {memory}", markup=False)
    console.print(f"{inventory.torch}, built for {inventory.torch.kind}", markup=False)
    for note in inventory.notes:
        console.print(f"note: {note}", markup=False)


def _table(rows: "tuple[Device, ...]", title: str) -> "Table":
    table = make_table(title, "name", "memory used", "processes")
    for device in rows:
        table.add_row(
            device.torch_name,
            escape(device.name),
            f"{gib(device.memory_used)} of {gib(device.memory_total)}",
            escape("\n".join(f"{process.name} {process.pid}" for process in device.processes)) or "-",
        )
    return table
