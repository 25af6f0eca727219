"""The RankMixer workload: reference block, runner and timing utility, plain eager PyTorch.

Reconstructed from the project brief (see ../README.md). This code is the numerical reference: it
stays unoptimised and unchanged; everything faster lives elsewhere and is compared against it.
"""
