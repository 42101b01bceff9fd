"""Downloads that are whole or not there: checked by md5, resumed after a break, safe between processes."""

import hashlib
import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import BinaryIO

from samestep.errors import DataError

CHUNK_BYTES = 1 << 18
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

    A file that is there and has the right md5 is left alone. Bytes arrive in `PATH.part`, which is renamed when it is
    complete and right; after a break it stays, and the next try, from any address, goes on where it ended. Several
    processes may ask for the same file: one downloads, the others wait (not on Windows, where each downloads).

    Args:
        urls: addresses of the same file, tried in this order.
        path: where it shall be; its folder is made.
        md5: the file's md5 in hexadecimal.
        timeout_seconds: how long a server may be silent.

    Returns:
        The path.

    Raises:
        DataError: no address gave the right file, or it cannot be written.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        if _has_md5(path, md5):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(part) as file:
            if _has_md5(path, md5):
                complete, problems = False, list[str]()
            else:
                complete, problems = _fill_from_any(file, urls, md5, timeout_seconds)
            size = file.seek(0, os.SEEK_END)
            if sys.platform == "win32":
                file.close()
            if complete:
                os.replace(part, path)
            elif not size or not problems:
                part.unlink()
    except OSError as error:
        raise DataError(
            f"{error.filename or path}: cannot be written: {error.strerror or error}; set XDG_CACHE_HOME to another "
            "folder, or read the files from one by --data-dir"
        ) from error
    if problems:
        raise DataError(f"{path.name} could not be downloaded; {OFFLINE_HINT}\n" + "\n".join(problems))
    return path


def _fill_from_any(file: BinaryIO, urls: Sequence[str], md5: str, timeout_seconds: float) -> tuple[bool, list[str]]:
    """Fills the file with the right bytes: whether it did, and if not, what was wrong with each address."""
    problems: list[str] = []
    for url in urls:
        restarted = file.seek(0, os.SEEK_END) == 0
        while True:
            before = file.seek(0, os.SEEK_END)
            problem = _continue(file, url, timeout_seconds)
            if problem and file.seek(0, os.SEEK_END) > before:
                continue
            if problem:
                break
            got = _md5_of(file)
            if got == md5:
                return True, []
            problem = f"the file there has the md5 {got}, needed: {md5}"
            file.truncate(0)
            if restarted:
                break
            # What an earlier try had left may be to blame.
            restarted = True
        problems.append(f"  {url}: {problem}")
    return False, problems


def _continue(file: BinaryIO, url: str, timeout_seconds: float) -> str:
    """Appends what is missing of a file; returns what went wrong, or nothing."""
    have = file.seek(0, os.SEEK_END)
    headers = {"User-Agent": "samestep"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:
            continues = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            if have and not continues:
                # The server sends the file from its start, whatever was asked.
                file.truncate(0)
                have = file.seek(0)
            promised = answer.headers.get("Content-Length")
            while piece := _read(answer):
                file.write(piece)
            file.flush()
            got = file.tell() - have
            if promised is not None and got < int(promised):
                return f"the connection broke after {have + got} of {have + int(promised)} bytes"
    except urllib.error.HTTPError as error:
        error.close()
        # 416: nothing lies beyond what is here already; the md5 tells whether that is the file.
        return "" if error.code == 416 and have else f"HTTP {error.code} {error.reason}"
    except _NetworkError as error:
        return str(error)
    except urllib.error.URLError as error:
        return str(error.reason)
    except (http.client.HTTPException, TimeoutError, ConnectionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _NetworkError(Exception):
    """Reading from the server failed; kept apart from a disk that is full, which is an OSError as well."""


def _read(answer: BinaryIO) -> bytes:
    try:
        return answer.read(CHUNK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _NetworkError(f"the connection broke: {error or type(error).__name__}") from error


@contextmanager
def _locked(part: Path) -> Iterator[BinaryIO]:
    """Opens the partial file for this process alone; waits for another one that has it."""
    while True:
        with part.open("a+b") as file:
            if sys.platform != "win32":
                import fcntl

                # A file system without locks lets several processes write at once: the md5 finds out.
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX)
                if not _is_at(file, part):
                    # Whoever had it has finished and renamed or removed it: look again.
                    continue
            yield file
            return


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _has_md5(path: Path, md5: str) -> bool:
    try:
        with path.open("rb") as file:
            return _md5_of(file) == md5
    except FileNotFoundError:
        return False


def _md5_of(file: BinaryIO) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    file.seek(0)
    while piece := file.read(CHUNK_BYTES):
        digest.update(piece)
    return digest.hexdigest()
