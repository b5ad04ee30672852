"""A script on four processes, two on each side of a link that is really slow: what is measured, planned and trained there.

    python -m benchmarks.slow_link --rate 50mbit -- examples/train_gpt.py --steps 30 --timed 5

The sides are network namespaces joined by a pair of virtual interfaces with a token bucket (`tc`), so that the kernel holds bytes back, as a slow
cable would; no rights are needed beyond user namespaces (Linux, iproute2). The script gets a cluster file of two machines with two devices each; it
measures the devices and links itself.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
CLUSTER = """
name: two-machines
machines:
  - {name: near, device: my-core, devices: 2}
  - {name: far, device: my-core, devices: 2}
device_types:
  my-core: {flops: 40 GFLOP/s, memory: 2 GiB, memory_bandwidth: 5 GB/s, kernel_latency: 20 us}
network:
  inter: {bandwidth: 50 Mbit/s, latency: 200 us}
  intra: {bandwidth: 1 GB/s, latency: 200 us}
"""
NEAR, FAR = "10.9.0.1", "10.9.0.2"
# In a namespace of its own: another one (of a process that sleeps), a cable between both, a rate at both of its ends, a launcher on each side.
SIDES = f"""
set -e
rate=$1; log=$2; shift 2
unshare -n sleep infinity & other=$!
trap 'kill $other' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
far="nsenter -t $other -n"
ip link add near type veth peer name far
ip link set far netns $other
ip addr add {NEAR}/24 dev near; $far ip addr add {FAR}/24 dev far
for device in lo near; do ip link set $device up; done
for device in lo far; do $far ip link set $device up; done
tc qdisc add dev near root tbf rate $rate burst 64kb latency 2s
$far tc qdisc add dev far root tbf rate $rate burst 64kb latency 2s
launch="$PYTHON -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --master-addr={NEAR} --master-port=29500"
GLOO_SOCKET_IFNAME=far $far $launch --node-rank=1 "$@" >$log 2>&1 & second=$!
status=0
GLOO_SOCKET_IFNAME=near $launch --node-rank=0 "$@" || status=$?
wait $second || {{ status=$?; cat $log; }}
exit $status
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="50mbit", help="of the link, as tc writes it")
    parser.add_argument("script", nargs="+", help="after --: the script and its arguments")
    args = parser.parse_args()
    environment = dict(os.environ, PYTHON=sys.executable, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", LOGLEVEL="ERROR", TORCH_CPP_LOG_LEVEL="ERROR")
    with TemporaryDirectory() as folder:
        cluster, log = Path(folder) / "cluster.yaml", Path(folder) / "far.log"
        cluster.write_text(CLUSTER)
        command = ["unshare", "-rn", "bash", "-c", SIDES, "sides", args.rate, str(log), *args.script, "--cluster", str(cluster)]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
