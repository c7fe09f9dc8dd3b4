# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the models, one package per op.

Owns: nothing itself; importing the package imports no op, so that a scheduler process can walk past it.
Never: imports vllm, reads configuration, or knows what a request is.
Ordering rule: contract and definition first, then the CPU variant, then the HPU variant; `registry.py` chooses.
"""
