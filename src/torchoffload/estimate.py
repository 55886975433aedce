"""``python -m torchoffload.estimate`` prints a training step's memory and time on a card, and which way to run it."""

import sys

from torchoffload._estimate.command import main
from torchoffload._estimate.estimate import estimate

if __name__ == "__main__":
    sys.exit(main())
else:
    # The import of a module sets an attribute of its package. This one leaves the function of that name there.
    sys.modules[__name__] = estimate  # type: ignore[assignment]
