//! The server's side of a session: it follows the client.

use std::sync::Arc;

use super::{
    bench,
    failure::{Failure, Result},
    message::{Message, Run, Side},
    options::ConnectMode,
    payload::Pattern,
    sender::Sender,
    session::Session,
};

/// What a server did.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Served {
    /// Runs, the first exchange not counted.
    pub(crate) runs: u64,
    /// Messages that arrived and were verified.
    pub(crate) messages: u64,
}

/// Answers the client's [`Message::Setup`] and everything after it, to the good-bye.
pub(crate) fn run(s: &mut Session, client: &Side, mode: ConnectMode) -> Result<Served> {
    s.local.connect_mode(Some(mode))?;
    s.connect(mode, client)?;
    s.link.send(&Message::Opened { side: Box::new(s.local.side.clone()) })?;
    match s.recv("connected")? {
        Message::Connected => {}
        m => return Err(s.unexpected(&m, "connected")),
    }
    let mut served = Served::default();
    loop {
        match s.recv("run")? {
            Message::Run { run } => {
                let what = format!("{}, {} bytes", run.test.name(), run.size);
                served.messages += serve(s, &run).map_err(|f| f.context(what))?;
                served.runs += u64::from(run.run != 0);
            }
            Message::Bye => {
                s.flush()?;
                s.link.send(&Message::Bye)?;
                return Ok(served);
            }
            m => return Err(s.unexpected(&m, "run")),
        }
    }
}

fn serve(s: &mut Session, run: &Run) -> Result<u64> {
    let max = s.local.side.limits.of(run.layout).unwrap_or(0);
    if !(super::sizes::SIZE_MIN..=max).contains(&run.size) {
        return Err(Failure::new(format!(
            "the client asks for {} bytes, and {} takes {} to {max} in one {} message here",
            run.size,
            s.local.side.transport,
            super::sizes::SIZE_MIN,
            run.layout.name()
        )));
    }
    let pattern = Arc::new(Pattern::new(run.run, run.size));
    let rx = s.expect(run, pattern.clone())?;
    let tx = Sender::new(&s.local, *run, pattern)?;
    s.link.send(&Message::Ready)?;
    bench::server(s, run, &tx, &rx)?;
    let count = match s.recv("sent")? {
        Message::Sent { count } => count,
        m => return Err(s.unexpected(&m, "sent")),
    };
    let received = rx.received();
    s.link.send(&Message::Received { count: received })?;
    if received == count {
        Ok(received)
    } else {
        Err(Failure::new(format!("verification failed: {count} messages were sent and {received} arrived")))
    }
}
