"""A Ray cluster of three nodes on this machine. Prints its address. Each line of stdin kills a node and starts another one; it ends with stdin."""

import sys

from ray.cluster_utils import Cluster

# The head runs no searches. Each other node says that it has a GPU, as the searches ask for one.
node = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80 << 20}


def patiently(start):
    """Ray gives a node 30 seconds to start, which a busy machine may not keep. A node that is late is one more."""
    for _ in range(9):
        try:
            return start()
        except Exception as late:
            print(late, file=sys.stderr)
    return start()


head = {**node, "num_gpus": 0, "include_dashboard": False}
cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
nodes = [patiently(lambda: cluster.add_node(wait=False, **node)) for _ in range(2)]
print(cluster.address, flush=True)
for _ in sys.stdin:
    cluster.remove_node(nodes.pop(0), allow_graceful=False)
    nodes.append(patiently(lambda: cluster.add_node(wait=False, **node)))
    print("killed", flush=True)
cluster.shutdown()
