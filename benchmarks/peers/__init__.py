"""Other engines under the same workloads: one script per engine, run by that engine's own Python.

The scripts need no asyncsched: beside their engine they import the standard library and
``benchmarks.workloads``. ``scripts/install_peers.sh`` installs the engines, ``benchmarks.compare`` runs them.
"""
