"""The demonstration: a long prompt into running streams, once under each policy, on a server that is really served."""
