"""Downloads that are whole or not there: checked by md5, safe between processes."""

import hashlib
import http.client
import os
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from samestep.errors import DataError

OFFLINE_HINT = "without a network, put the files into a folder and give it by --data-dir"


def cache_folder() -> Path:
    """Where downloads are kept: `samestep` in the user's cache folder.

    That is `$XDG_CACHE_HOME` where it is set, else `~/.cache` (Linux), `~/Library/Caches` (macOS) or `%LOCALAPPDATA%`
    (Windows). Nothing is created here.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "samestep"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "samestep"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "samestep" / "cache"
    return Path.home() / ".cache" / "samestep"


def fetch(urls: Sequence[str], path: str | PathLike[str], md5: str, *, timeout_seconds: float = 30.0) -> Path:
    """Makes sure that a file is there, by a download from the first address that has it.

    A file that is there and has the right md5 is left alone. Only a whole and right file gets its name. Several
    processes may ask for the same file: one downloads, the others wait (not on Windows, where each downloads).
    """
    path = Path(path)
    try:
        if _has_md5(path, md5):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            problems = [] if _has_md5(path, md5) else _download(urls, path, md5, timeout_seconds)
    except OSError as error:
        raise DataError(
            f"{error.filename or path}: cannot be written: {error.strerror or error}; set XDG_CACHE_HOME to another "
            "folder, or read the files from one by --data-dir"
        ) from error
    if problems:
        raise DataError(f"{path.name} could not be downloaded; {OFFLINE_HINT}\n" + "\n".join(problems))
    return path


def _download(urls: Sequence[str], path: Path, md5: str, timeout_seconds: float) -> list[str]:
    """Downloads the file; returns nothing, or the problem with each address."""
    problems = []
    for url in urls:
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "samestep"})
            with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:
                content = answer.read()  # in memory, so that an OSError here is the network's and not the disk's
        except (OSError, http.client.HTTPException, ValueError) as error:
            problems.append(f"  {url}: {error or type(error).__name__}")
            continue
        got = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if got == md5:
            part = path.with_name(f"{path.name}.{os.getpid()}.part")
            try:
                part.write_bytes(content)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            return []
        problems.append(f"  {url}: the file there has the md5 {got}, needed: {md5}")
    return problems


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes that download to a folder waiting, if its file system has locks."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _has_md5(path: Path, md5: str) -> bool:
    """Whether a file is there and has this md5."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == md5
    except FileNotFoundError:
        return False
