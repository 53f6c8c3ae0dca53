"""Scopes in which torch's own calls are computed by isogemm."""
