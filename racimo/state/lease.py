"""How long a node may go on with what only its user understands, without a word from the control process."""

LEASE_S = 600.0
"""After so long an agent ends what is not exact, on its own clock; the control process waits longer by a margin."""
