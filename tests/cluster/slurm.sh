#!/usr/bin/env bash
# A one-node Slurm for one test, beside any other on the machine: its own
# configuration, key, socket, ports and logs, all inside one folder.
#
#   tests/cluster/slurm.sh start DIR     ends when the node takes jobs
#   tests/cluster/slurm.sh stop DIR
#
# Clients reach it through SLURM_CONF=DIR/slurm.conf. Needs Slurm and munge,
# not root: everything runs as the caller, who is then the only user.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

start() {
    local dir=$1 user node port cpus
    user=$(id -un)
    node=$(hostname -s)
    cpus=$(nproc)
    # Two free ports, so that neither another Slurm nor another test is met.
    port=$(python3 - <<'PY'
import socket
for first in range(21817, 31817, 2):
    try:
        with socket.socket() as a, socket.socket() as b:
            a.bind(("", first))
            b.bind(("", first + 1))
    except OSError:
        continue
    print(first)
    break
PY
)
    mkdir -p "$dir/state" "$dir/spool"
    # munged refuses a key, a log or a socket that others could write.
    chmod 0755 "$dir"
    (umask 077; head -c 128 /dev/urandom >"$dir/munge.key")

    cat >"$dir/slurm.conf" <<CONF
ClusterName=mpishard_test
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
CredType=cred/munge
MpiDefault=pmix
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
# The node may claim more processors than it has: 4 ranks run anywhere.
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
NodeName=$node NodeAddr=127.0.0.1 CPUs=$((cpus > 8 ? cpus : 8)) State=UNKNOWN
PartitionName=test Nodes=$node Default=YES MaxTime=INFINITE State=UP
CONF

    munged --force --socket="$dir/munge.socket" --key-file="$dir/munge.key" \
        --pid-file="$dir/munged.pid" --log-file="$dir/munged.log" --seed-file="$dir/munged.seed"
    export SLURM_CONF=$dir/slurm.conf
    slurmctld -f "$SLURM_CONF"
    slurmd -f "$SLURM_CONF" -N "$node"

    for _ in $(seq 60); do
        if [ "$(sinfo -h -o %T 2>/dev/null)" = idle ]; then return; fi
        sleep 0.5
    done
    echo "slurm.sh: expected an idle node within 30 s; sinfo and the logs say:" >&2
    sinfo >&2 || true
    for log in "$dir"/*.log; do echo "== $log"; tail -n 20 "$log"; done >&2
    stop "$dir"
    exit 1
}

stop() {
    local dir=$1 daemon pid
    # slurmd goes before its controller, and munged, which both need, last.
    for daemon in slurmd slurmctld munged; do
        [ -s "$dir/$daemon.pid" ] || continue
        pid=$(cat "$dir/$daemon.pid")
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 40); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.25
        done
        kill -9 "$pid" 2>/dev/null || true
    done
}

case "${1-}" in
    start | stop) [ $# -eq 2 ] && "$1" "$(realpath -m "$2")" && exit ;;
esac
echo "usage: $0 start|stop DIR" >&2
exit 2
