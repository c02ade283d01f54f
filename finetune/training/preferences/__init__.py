"""Pairs and labelled answers: from encoded rows to the losses of DPO, SimPO, ORPO and KTO."""
