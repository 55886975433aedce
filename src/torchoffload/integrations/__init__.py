"""Integrations with the trainers of other libraries, one line each. Nothing in here is imported unless it is asked for.

=====================  ==========================================================
``.transformers``      ``OffloadActivationsCallback`` for Hugging Face's ``Trainer`` and its subclasses
``.trl``               ``install()``: TRL's ``activation_offloading=True`` is carried out by torchoffload
``.lightning``         ``OffloadActivationsCallback`` for Lightning's ``Trainer``
``.accelerate``        ``offload_prepared(accelerator, model)``
=====================  ==========================================================

With ``memory=``, each of them has ``torchoffload.fit`` choose which tensors are kept, moved or computed again.
"""
