//! The sending half of one run: numbered, patterned messages in the layout that the user chose.

use std::{io::IoSlice, sync::Arc};

use uct::{Ep, MemRegion, SendResult};

use super::{
    failure::{Failure, Result},
    local::Local,
    message::Run,
    options::Layout,
    payload::{Ask, HEADER_LEN, Header, Pattern},
    session::DATA_ID,
};

/// What the messages of a run are made from.
pub(crate) struct Sender {
    run: Run,
    pattern: Arc<Pattern>,
    /// The pattern in registered memory, for zero copy. All messages in flight share it, since nobody writes it.
    region: Option<MemRegion>,
}

impl Sender {
    pub(crate) fn new(local: &Local, run: Run, pattern: Arc<Pattern>) -> Result<Sender> {
        let region = match run.layout {
            Layout::Zcopy => {
                let mut region = local.md.mem_alloc(pattern.bytes().len())?;
                let bytes = region.bytes_mut().ok_or_else(|| Failure::new("new memory is in use already"))?;
                bytes[..pattern.bytes().len()].copy_from_slice(pattern.bytes());
                Some(region)
            }
            _ => None,
        };
        Ok(Sender { run, pattern, region })
    }

    /// Sends message `seq`, if there is room.
    #[inline]
    pub(crate) fn try_send(&self, ep: &Ep, seq: u64, ask: Ask) -> SendResult<()> {
        let header = Header { seq, run: self.run.run, ask };
        match self.run.layout {
            Layout::Short => ep.am_short(DATA_ID, header.to_word(), self.pattern.payload(seq)),
            Layout::Shortiov => {
                let (a, b) = self.pattern.payload(seq).split_at((self.run.size - HEADER_LEN) / 2);
                ep.am_short_iov(DATA_ID, &[IoSlice::new(&header.to_bytes()), IoSlice::new(a), IoSlice::new(b)])
            }
            Layout::Bcopy => {
                let payload = self.pattern.payload(seq);
                let n = HEADER_LEN + payload.len();
                ep.am_bcopy(DATA_ID, &mut |buf| {
                    // A peer that takes less leaves less room; then the call says so.
                    if let Some(buf) = buf.get_mut(..n) {
                        buf[..HEADER_LEN].copy_from_slice(&header.to_bytes());
                        buf[HEADER_LEN..].copy_from_slice(payload);
                    }
                    n
                })?;
                Ok(())
            }
            Layout::Zcopy => {
                let header = header.to_bytes();
                // A flush at the end of the run stands for the completions.
                match &self.region {
                    Some(r) if self.run.size > HEADER_LEN => {
                        let _ = ep.am_zcopy(DATA_ID, &header, &[r.slice(self.pattern.range(seq))?], None)?;
                    }
                    _ => {
                        let _ = ep.am_zcopy(DATA_ID, &header, &[], None)?;
                    }
                }
                Ok(())
            }
        }
    }
}
