#!/bin/sh
# run.sh COMMAND...: installs Slurm where it is missing, and runs a command where a Slurm of its own can be started.
set -eu
PATH=$PATH:/usr/sbin:/sbin

if [ "$(id -u)" != 0 ]; then
    echo "test-slurm needs root, and Debian's slurm-wlm, munge, iproute2 and util-linux: sudo make test-slurm" >&2
    exit 2
fi
missing=
for program in slurmctld slurmd sbatch munged unshare ip ss; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
if [ "$missing" ]; then
    echo "not here:$missing; installing slurm-wlm, munge, iproute2 and util-linux" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2 util-linux >/dev/null
fi

# Inside: no network but loopback, no process but ours, own host names, and temporary files that go away with it.
# When its first process ends, however it ends, so do all others; a shell, since somebody has to reap orphans.
exec unshare --net --pid --fork --kill-child --mount --mount-proc --uts sh -euc '
    hostname control
    ip link set lo up
    # Names are looked up only on a machine that has an address other than loopback; nobody uses this one.
    ip address add 192.0.2.1/32 dev lo
    mount -t tmpfs -o mode=755 none /run
    echo 127.0.0.1 localhost control n1 n2 >/run/hosts
    mount --bind /run/hosts /etc/hosts
    export TMPDIR=/run
    "$@"
' sh "$@"
