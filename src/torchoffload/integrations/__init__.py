"""Integrations with the trainers of other libraries, one line each. Nothing in here is imported unless it is asked for.

=====================  ==========================================================
``.transformers``      ``OffloadActivationsCallback`` for Hugging Face's ``Trainer`` and what derives from it
``.trl``               ``install()``: TRL's ``activation_offloading=True`` is carried out by torchoffload
``.lightning``         ``OffloadActivationsCallback`` for Lightning's ``Trainer``
``.accelerate``        ``offload_prepared(accelerator, model)``
=====================  ==========================================================

With ``memory=``, each of them has ``torchoffload.fit`` choose what is kept, what moves and what is computed again.
"""
