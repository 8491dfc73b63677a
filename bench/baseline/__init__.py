"""vLLM's example proxy in front of simulated servers: what this project is compared with.

The proxy is vLLM's own, taken from its source distribution at run time. The servers behind it are ours: they
speak the part of vLLM's interface that the proxy uses, on the simulated engines that our own workers run.
"""
