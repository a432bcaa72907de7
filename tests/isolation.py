"""Tests that see none of the files, ports and labs of other tests that run at the same time."""

import os
import tempfile

from paceline.lab import kernel


def isolate_files(prefix: str) -> str:
    """Give this process a new folder for temporary files, which is returned, and, as root, an empty /dev/shm."""
    if os.getuid() == 0:
        kernel.unshare(kernel.NEW_MOUNT)
        kernel.mount("none", "/", flags=kernel.MS_RECURSIVE | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", "/dev/shm", "tmpfs")
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix=prefix)
    os.chmod(tempfile.tempdir, 0o711)  # tests as another user have folders in it
    return tempfile.tempdir


def isolate_network() -> None:
    """Give this process, as root, a network of its own that has only loopback."""
    if os.getuid() == 0:
        from pyroute2 import IPRoute

        kernel.unshare(kernel.NEW_NETWORK)
        with IPRoute() as ip:
            ip.link("set", index=1, state="up")
