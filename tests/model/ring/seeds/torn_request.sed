# options: --scenario retry --strong --preemptions 2 --deaths 0
# A row is believed without its checksum.
s/copy->crc == entry_crc(copy) && //
