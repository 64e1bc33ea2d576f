"""Ray Core as the carrier of machines (`docs/decisions/0002`): started as a process (`python -m racimo.act.ray`), never
imported by others. Its only modules that import Ray are `driver` and, inside Ray's own workers, nothing."""
