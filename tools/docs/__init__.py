# SPDX-License-Identifier: Apache-2.0
"""The documentation site: what is generated in docs/, by what it is read from, and the site itself.

Owns: nothing itself; ``python -m tools.docs`` is the command.
Never: torch or vLLM; a number that is computed neither here nor in the package.

Ordering rule: none.
"""
