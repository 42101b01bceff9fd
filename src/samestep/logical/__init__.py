"""Logical devices: a script that deals with ranks itself runs as V ranks on the devices that there are."""
