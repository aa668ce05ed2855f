//! Owns errors that clients receive: a status, and the error object of the API.

use axum::body::Body;
use axum::http::{Response, StatusCode, header};
use serde_json::json;

use super::log::Refusal;
use crate::engine::{End, Refused};
use crate::error::{Fault, Tier};
use crate::sample::SampleError;

/// A refusal, as `{"error": {"message", "type", "param", "code"}}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
    /// The field that is wrong.
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

impl ApiError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), param: None, code: None }
    }

    /// The client has to change the request.
    pub fn bad(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    /// The client has to change this field.
    pub fn field(name: impl Into<String>, message: impl std::fmt::Display) -> ApiError {
        let name = name.into();
        ApiError { param: Some(name.clone()), ..ApiError::bad(format!("`{name}`: {message}")) }
    }

    /// Too many requests at the same time.
    pub fn busy(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).with_code("server_busy")
    }

    /// The engine does not run at present.
    pub fn dead(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("engine_unavailable")
    }

    pub fn with_code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// The error object; a stream that fails ends with it, too.
    pub fn object(&self) -> serde_json::Value {
        let ApiError { message, param, code, .. } = self;
        json!({ "error": { "message": message, "type": self.kind(), "param": param, "code": code } })
    }

    pub fn response(&self) -> Response<Body> {
        let mut response = Response::new(Body::from(self.object().to_string()));
        *response.status_mut() = self.status;
        response.extensions_mut().insert(Refusal(self.message.clone()));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            headers.insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> ApiError {
        let message = refused.to_string();
        match refused {
            Refused::Busy { .. } => ApiError::busy(message),
            Refused::NoPrompt | Refused::Token { .. } => ApiError::field("prompt", message),
            Refused::Context { .. } => ApiError::field("prompt", message).with_code("context_length_exceeded"),
            Refused::Pages { .. } => ApiError::field("max_tokens", message).with_code("context_length_exceeded"),
        }
    }
}

impl From<SampleError> for ApiError {
    fn from(error: SampleError) -> ApiError {
        let message = error.to_string();
        // The message begins with the name of a setting, spelled as its option of the command line.
        let Some((setting, rest)) = message.split_once(": ") else { return ApiError::bad(message) };
        match (setting, setting.strip_prefix("logit-bias of ")) {
            (_, Some(id)) => ApiError::field("logit_bias", format!("{id}: {rest}")),
            ("stop ids", _) => ApiError::field("stop_token_ids", rest),
            _ => ApiError::field(setting.replace('-', "_"), rest),
        }
    }
}

/// Faults of a tokenizer: it refused the text or messages, or its process ended.
impl From<Fault> for ApiError {
    fn from(fault: Fault) -> ApiError {
        let status = match fault.tier {
            Tier::Input => StatusCode::BAD_REQUEST,
            Tier::Environment | Tier::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        };
        ApiError::new(status, fault.message)
    }
}

/// The `finish_reason` of a choice that ended; an error if the API has none for it.
pub fn finish_reason(end: &End) -> Result<&'static str, ApiError> {
    match end {
        End::Stop => Ok("stop"),
        End::Length => Ok("length"),
        End::Cancelled => Err(ApiError::dead("the request was cancelled here").with_code("cancelled")),
        End::Deadline => {
            Err(ApiError::new(StatusCode::GATEWAY_TIMEOUT, "the request took longer than this server allows")
                .with_code("timeout"))
        }
        End::Grammar(error) => Err(ApiError::bad(error.to_string()).with_code("grammar_too_complex")),
        End::Choice(error) => Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::sample::{RequestSettings, SampleSettings};

    #[test]
    fn a_setting_is_refused_by_the_name_of_its_field() {
        let neutral = RequestSettings::plain(SampleSettings { temperature: 0.0, top_k: None, top_p: None, seed: 0 });
        for (settings, param, message) in [
            (
                RequestSettings { min_p: 2.0, ..neutral.clone() },
                "min_p",
                "`min_p`: expected a number from 0 to 1, found `2`",
            ),
            (
                RequestSettings { logit_bias: BTreeMap::from([(3, 101.0)]), ..neutral.clone() },
                "logit_bias",
                "`logit_bias`: id 3: expected a number from -100 to 100, found `101`",
            ),
            (
                RequestSettings { stop_ids: vec![77], ..neutral.clone() },
                "stop_token_ids",
                "`stop_token_ids`: expected ids below 50 (the model's vocabulary), found 77",
            ),
        ] {
            let error = ApiError::from(settings.resolve(50, &[]).unwrap_err());
            assert_eq!((error.param.as_deref(), error.message.as_str()), (Some(param), message));
        }
    }
}
