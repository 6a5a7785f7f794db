"""Whose shared memory is attached here."""

from __future__ import annotations

from kvtransfer.transports.ucx_leaks import attached_segments, creators, leaked_attachments

MAPS = """\
7f0000000000-7f0000010000 rw-s 00000000 00:01 98305                      /SYSV00000000 (deleted)
7f0000010000-7f0000020000 rw-p 00000000 00:00 0
7f0000020000-7f0000030000 rw-s 00000000 00:01 98305                      /SYSV00000000 (deleted)
7f0000030000-7f0000040000 rw-s 00000000 00:01 7                          /SYSV0000002a
7f0000040000-7f0000050000 r-xp 00000000 08:01 123                        /usr/lib/libc.so.6
"""
TABLE = """\
       key      shmid perms                  size  cpid  lpid nattch   uid   gid  cuid  cgid      atime      dtime      ctime
         0      98305   666               4296704   411   412      1     0     0     0     0 1700000000          0 1700000000
        42          7   600                  4096     1   412      2     0     0     0     0 1700000000          0 1700000000
"""


def test_segments_are_found_once_and_files_are_not() -> None:
    assert attached_segments(MAPS) == {98305, 7}
    assert attached_segments("") == set()


def test_makers_are_read_from_the_kernels_table() -> None:
    assert creators(TABLE) == {98305: 411, 7: 1}
    assert creators("") == {}


def test_this_process_has_none_of_the_dead() -> None:
    assert leaked_attachments() == 0
