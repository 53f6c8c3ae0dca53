"""What the doctor says: right, wrong with its causes, or that these operands cannot tell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A mistake that explains the result.

    Attributes
    ----------
    name : str
        As in `isogemm.doctor.MISTAKES`; two names with " + " between them for a pair.
    parameter : str
        What was used where.
    residual : float
        Greatest remaining error, in units of ``eps * sqrt(K) * (|A| @ |B|)``.
    explained : float
        Share of the wrong elements that it explains.
    mend : str
        What to do.
    indistinguishable_from : tuple of str
        Mistakes that explain the same elements on these operands.
    """

    name: str
    parameter: str
    residual: float
    explained: float
    mend: str
    indistinguishable_from: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """The doctor's finding.

    Attributes
    ----------
    verdict : {"right", "wrong", "undiagnosable"}
    causes : tuple of Cause
        The likeliest first; none where nothing in the bank explains the result. Of a right result ``other-order``,
        where its bits are not those of the contract that was asked for, or differ from run to run.
    elements, wrong : int
        Of the result, and those outside of what any order of a right sum gives.
    residual : float
        Greatest error of the result as it is, in the units of `Cause.residual`.
    order : str
        Of a right result, where it could be told: the order of the sum over K.
    first : tuple of str
        The first wrong elements: where, what is there, and what should be.
    limits : tuple of str
        What these operands cannot show, and what would.
    """

    verdict: str
    causes: tuple[Cause, ...] = ()
    elements: int = 0
    wrong: int = 0
    residual: float = 0.0
    order: str = ""
    first: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        """0 right, 1 otherwise."""
        return 0 if self.verdict == "right" else 1

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        lines = [self._headline()]
        if self.verdict == "right":
            if self.order:
                lines.append(f"  order of the sum over K: {self.order}")
            lines += [f"  {cause.name}: {cause.parameter}; mend: {cause.mend}" for cause in self.causes]
            return [*lines, *(f"  note: {text}" for text in self.limits)]
        lines += [f"  {text}" for text in self.first]
        for i, cause in enumerate(self.causes[:3]):
            lines.append(f"  {'likely cause' if i == 0 else 'or'}: {cause.name}: {cause.parameter}")
            lines.append(
                f"    explains {cause.explained:.1%} of the wrong elements; "
                f"residual {self.residual:.3g} -> {cause.residual:.3g} of eps * sqrt(K) * (|A||B|)"
            )
            lines.append(f"    mend: {cause.mend}")
            if i == 0 and cause.indistinguishable_from:
                lines.append(f"    these operands cannot tell it from: {', '.join(cause.indistinguishable_from)}")
        return [*lines, *(f"  limit: {text}" for text in self.limits)]

    def _headline(self) -> str:
        if self.verdict == "right":
            return f"right: all {self.elements} elements within rounding"
        if self.verdict == "undiagnosable" and not self.elements:
            return "undiagnosable: there is no result to look at"
        share = f"{self.wrong} of {self.elements} elements are wrong"
        if self.verdict == "undiagnosable":
            return f"undiagnosable: {share}, and these operands cannot tell why"
        return f"wrong: {share}" + ("" if self.causes else "; none of the mistakes in the bank explains them")
