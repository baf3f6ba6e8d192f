"""Keeps the pages of mapped weight files from counting as ours for longer than we look at them."""

from __future__ import annotations

import mmap


def release_pages(mapped: mmap.mmap) -> None:
    """Take a read-only file mapping's pages out of this process. They stay in the system's cache, and whoever still has
    a view of them reads them from there again."""
    if hasattr(mmap, "MADV_DONTNEED") and hasattr(mapped, "madvise"):  # not on Windows
        mapped.madvise(mmap.MADV_DONTNEED)
