# SPDX-License-Identifier: Apache-2.0
"""A stub of Gaudi's PyTorch bridge, for tests: the public names and signatures, computed on CPU tensors.

It proves glue, not kernels. What a test with it shows: that a variant was reached, with arguments of the order, dtype,
shape and contiguity that the public interface documents, and that the arithmetic around the call is right. What it
cannot show: a kernel's accuracy or speed, what Gaudi's compiler does to a graph, what HCCL does; those are listed in
docs/hpu-unproved.md.

Strict on purpose: an unknown keyword, another dtype, a tensor that is not contiguous or a shape that does not fit is an
error here, even where the bridge would have coped. Every call is noted in ``habana_frameworks.calls``.

Put on PYTHONPATH by tests only (the folder above this package).
"""
